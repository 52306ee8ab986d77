"""Named points at which a test can kill the process: `RLHFD_CRASH_AT=name` or `name:N` for its N-th passing.

A point stands between two effects whose order matters (a commit and what follows from it, a rename and its fsync).
`POINTS` must equal the names found in the source: a test compares them.
"""

import os
import signal
from collections import Counter

VARIABLE = "RLHFD_CRASH_AT"

POINTS: frozenset[str] = frozenset(
    {
        "generate.row",
        "learn.answered",
        "learn.applied",
        "learn.progress",
        "learn.sent",
        "publish.loaded",
        "publish.paused",
        "publish.recorded",
        "save.begun",
        "save.committed",
        "save.durable",
        "step.recorded",
    }
)

_passed: Counter[str] = Counter()


def here(name: str) -> None:
    """Die by SIGKILL if the environment names this point. Raises ValueError for a point that is not in the table."""
    if name not in POINTS:
        raise ValueError(f"{name} is not a crash point: add it to POINTS")
    wanted, _, nth = os.environ.get(VARIABLE, "").partition(":")
    if wanted != name:
        return
    _passed[name] += 1
    if _passed[name] == int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
