"""`rlhfd audit`: whether every stored log-prob is what the version it names gives.

Weights are derived again, from the oldest checkpoint whose later steps still have their rollouts, by replaying the
redo log. At version s the tokens labelled s are compared (they must agree), and those labelled s - 1 (they must not:
the neighbour, which shows that the label says something). Tokens whose version lies before that checkpoint, or is
lost, count as not re-derivable, never as agreeing.
"""

from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rlhfd.core import wire
from rlhfd.core.ledger import reproduces
from rlhfd.core.types import JobId, JobState, Step
from rlhfd.daemon.house import House
from rlhfd.daemon.replica import Replica, replica
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.errors import ReplayDivergedError, UsageError
from rlhfd.pipeline.frames import group_frames, labelled_frames
from rlhfd.store import checkpoints, jobs, progress, steps

GROUPS_A_CALL = 8


@dataclass(kw_only=True, slots=True)
class Errors:
    """|stored - derived| over a set of tokens, nats."""

    n: int = 0
    total: float = 0.0
    worst: float = 0.0

    def add(self, gaps: Iterable[float]) -> None:
        """More of them."""
        for gap in gaps:
            self.n += 1
            self.total += gap
            self.worst = max(self.worst, gap)

    @property
    def mean(self) -> float | None:
        """None without any token."""
        return self.total / self.n if self.n else None


@dataclass(kw_only=True, slots=True)
class Tally:
    """The report in the making: version step -> errors under its own weights, and under the next version's."""

    own: dict[int, Errors] = field(default_factory=dict[int, Errors])
    neighbour: dict[int, Errors] = field(default_factory=dict[int, Errors])


async def audit(house: House, supervisor: Supervisor, job_id: JobId) -> AsyncIterator[dict[str, Any]]:
    """Progress objects, then the report. Raises UsageError for a running job, ReplayDivergedError."""
    job = await jobs.job(house.db, job_id)
    if job.state is JobState.RUNNING:
        raise UsageError(f"job {job_id} is running; pause it first: rlhfd pause {job_id}")
    gone = await progress.collected_to(house.db, job_id)
    kept = sorted(await checkpoints.newest_valid(house.db, job_id), key=lambda c: c.step)
    base = None if gone == 0 else next((c for c in kept if c.step >= gone), None)
    if gone and base is None:
        raise UsageError(f"job {job_id} has no checkpoint from which its stored rollouts can be derived again")
    tally = Tally()
    async with replica(house, supervisor, job, base, "audit") as held:
        log = await steps.applied_after(house.db, job_id, held.step)
        for done, step in enumerate([*log, None]):
            await _compare(held, tally, held.step + done)
            yield {"phase": f"version {held.step + done}", "done": done + 1, "total": len(log) + 1}
            if step is not None:
                await _replay(held, step)
    yield await _report(house, job_id, tally)


async def _replay(held: Replica, step: Step) -> None:
    frames = await group_frames(held.context, step)
    settings = msgspec.convert(step.settings, wire.StepSettings)
    call = wire.Learn(step=step.n, version_in=step.n - 1, groups=len(frames), settings=settings, trace=[])
    learned = await held.client.learn(call, frames)
    recorded = msgspec.convert(step.fingerprint, wire.Fingerprint)
    if not reproduces(recorded, learned.fingerprint, exact=held.numerics.get("device") == "cpu"):
        raise ReplayDivergedError(
            f"step {step.n} did not reproduce its fingerprint: the weights of later versions can't be derived here"
        )


async def _compare(held: Replica, tally: Tally, version: int) -> None:
    """Tokens labelled `version` and `version - 1`, under the weights of `version`."""
    frames = await labelled_frames(held.context, versions=(version - 1, version))
    for at in range(0, len(frames), GROUPS_A_CALL):
        part = frames[at : at + GROUPS_A_CALL]
        call = wire.LogProbs(groups=len(part), temperature=held.context.config.rollout.temperature)
        reply = await held.client.logprobs(call, part)
        for frame in (rollout for group in part for rollout in group.rollouts):
            derived = _floats(reply.logps[frame.id])
            stored, labels = _floats(frame.logps), _ints(frame.versions)
            own = [abs(a - b) for a, b, v in zip(stored, derived, labels, strict=True) if v == version]
            next_to = [abs(a - b) for a, b, v in zip(stored, derived, labels, strict=True) if v == version - 1]
            tally.own.setdefault(version, Errors()).add(own)
            tally.neighbour.setdefault(version - 1, Errors()).add(next_to)


async def _report(house: House, job_id: JobId, tally: Tally) -> dict[str, Any]:
    own, neighbour = _sum(tally.own.values()), _sum(tally.neighbour.values())
    total = await progress.tokens_stored(house.db, job_id)
    return {
        "tokens": own.n,
        "mean_error": own.mean,
        "max_error": own.worst if own.n else None,
        "neighbour_mean_error": neighbour.mean,
        "not_rederivable": total - own.n,
        "per_version": [
            {
                "version": version,
                "tokens": errors.n,
                "mean_error": errors.mean,
                "max_error": errors.worst,
                "neighbour_mean_error": tally.neighbour.get(version, Errors()).mean,
            }
            for version, errors in sorted(tally.own.items())
            if errors.n
        ],
    }


def _sum(parts: Iterable[Errors]) -> Errors:
    whole = Errors()
    for part in parts:
        whole.n, whole.total, whole.worst = whole.n + part.n, whole.total + part.total, max(whole.worst, part.worst)
    return whole


def _floats(data: bytes) -> Sequence[float]:
    values = array("f")
    values.frombytes(data)
    return values


def _ints(data: bytes) -> Sequence[int]:
    values = array("i")
    values.frombytes(data)
    return values
