"""What a reward sees and may answer: a `Sample` in, one finite number out, everything else a `RewardError`.

`supervise` is the one place where code that is not ours (a user's function, a verifier's library) is fenced: whatever
it raises, SystemExit and KeyboardInterrupt included, becomes a sentence. Nothing here turns a fault into a zero.
"""

import linecache
import math
import reprlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat, TypeVar, cast

from rlhfd.errors import JobFileError, RewardError

T = TypeVar("T")

LONGEST_QUOTE = 300  # characters of a foreign message that are passed on


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout as a reward sees it. `prompt`: text or chat messages; `columns`: the row's extra columns."""

    prompt: str | list[dict[str, Any]]
    completion: str
    completion_ids: list[int]
    truncated: bool
    columns: Mapping[str, Any]


class Reward(Protocol):
    """One entry of the job's [[reward]] list, ready to be called. What it returns is not checked yet."""

    @property
    def name(self) -> str:
        """How it is called in metrics and messages."""
        ...

    @property
    def file(self) -> str:
        """The user's file, as tracebacks show it; empty where the reward is not user code."""
        ...

    def __call__(self, sample: Sample) -> object:
        """What the reward says about one rollout."""
        ...


class ForeignError(Exception):
    """Code that is not ours raised; the message says what and at which line of the user's file."""


def supervise(call: Callable[[], T], *, file: str = "") -> T:
    """Run code that is not ours. Raises ForeignError for whatever it raises, but lets our own errors pass.

    `file` is the name under which the user's source was compiled; the last of its lines on the way is named.
    """
    try:
        return call()
    except (RewardError, JobFileError):
        raise
    except BaseException as problem:  # user code may raise SystemExit and worse; the worker must live on
        raise ForeignError(describe(problem, file=file)) from problem


def describe(problem: BaseException, *, file: str = "") -> str:
    """`ValueError: no number (rewards.py, line 12)`, from an exception of foreign code."""
    last = traceback.format_exception_only(problem)[-1].strip()
    if len(last) > LONGEST_QUOTE:
        last = f"{last[:LONGEST_QUOTE]}…"
    line = _last_line_in(problem, file)
    return f"{last} ({file}, line {line})" if line else last


def _last_line_in(problem: BaseException, file: str) -> int | None:
    if isinstance(problem, SyntaxError) and problem.filename == file:
        return problem.lineno
    lines = [line for frame, line in traceback.walk_tb(problem.__traceback__) if frame.f_code.co_filename == file]
    return lines[-1] if lines else None


def evaluate(reward: Reward, sample: Sample) -> float:
    """The reward's value for one rollout. Raises RewardError of kind exception, wrong_type or not_finite."""
    try:
        return supervise(lambda: as_number(reward(sample), name=reward.name), file=reward.file)
    except ForeignError as problem:
        raise RewardError(f"reward {reward.name} raised {problem}", kind="exception") from problem


def as_number(returned: object, *, name: str) -> float:
    """A finite float from what a reward returned: any real scalar, also of numpy or torch; a bool is 0.0 or 1.0.

    Raises RewardError: wrong_type for None, text, containers and arrays, not_finite for NaN and infinities.
    """
    quoted = reprlib.repr(returned)
    if not hasattr(type(returned), "__float__") or getattr(returned, "ndim", 0):
        raise RewardError(f"reward {name} returned {quoted}, which is not one number", kind="wrong_type")
    try:
        number = float(cast("SupportsFloat", returned))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"reward {name} returned {quoted}, which is not a finite number", kind="not_finite")
    return number


def only_value(returned: object, *, name: str) -> object:
    """The one value of a batch of one. Raises RewardError (wrong_type) for anything but a sequence of length 1."""
    is_sequence = hasattr(returned, "__getitem__") and hasattr(returned, "__len__")
    if not is_sequence or isinstance(returned, (str, bytes, dict)):
        raise RewardError(
            f"reward {name} takes a batch and returned {reprlib.repr(cast('object', returned))}; "
            "it must return a list with one number per completion",
            kind="wrong_type",
        )
    values = cast("list[object]", returned)
    if len(values) != 1:
        raise RewardError(f"reward {name} returned {len(values)} values for 1 completion", kind="wrong_type")
    return values[0]


def show_source(file: str, source: str) -> None:
    """Let tracebacks in the log quote the user's source, which was compiled under another name than its file's."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
