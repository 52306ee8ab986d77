"""Every transition of every kind of row: one literal table that knows nothing else.

A row of the table reads *from, event, to*; the enum says whose states they are. The store writes no state that is not
named here: its updates take `sources` and `target` of an event, so an illegal move raises and changes nothing.

Decision: an event has exactly one target, so a guarded update is `SET state = target WHERE state IN sources`.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

from rlhfd.core.types import CheckpointState, GroupState, JobState, RolloutState, StepState, VersionState
from rlhfd.errors import UsageError

State = TypeVar("State", bound=StrEnum)

INITIAL: dict[type[StrEnum], StrEnum] = {
    JobState: JobState.QUEUED,
    GroupState: GroupState.OPEN,
    RolloutState: RolloutState.PENDING,
    StepState: StepState.RECORDED,
    VersionState: VersionState.TRAINED,
    CheckpointState: CheckpointState.WRITING,
}

TABLE: tuple[tuple[StrEnum, str, StrEnum], ...] = (
    # job: only `running` holds devices; a running job of an older epoch is claimed again
    (JobState.QUEUED, "claim", JobState.RUNNING),
    (JobState.RUNNING, "claim", JobState.RUNNING),
    (JobState.PAUSED, "requeue", JobState.QUEUED),
    (JobState.FAILED, "requeue", JobState.QUEUED),
    (JobState.CANCELLED, "requeue", JobState.QUEUED),
    (JobState.QUEUED, "pause", JobState.PAUSED),
    (JobState.RUNNING, "pause", JobState.PAUSED),
    (JobState.RUNNING, "finish", JobState.DONE),
    (JobState.QUEUED, "fail", JobState.FAILED),
    (JobState.RUNNING, "fail", JobState.FAILED),
    (JobState.QUEUED, "cancel", JobState.CANCELLED),
    (JobState.RUNNING, "cancel", JobState.CANCELLED),
    (JobState.PAUSED, "cancel", JobState.CANCELLED),
    # group: a diverged replay takes back what was consumed, for a new record over the same groups
    (GroupState.OPEN, "complete", GroupState.READY),
    (GroupState.OPEN, "drop", GroupState.DROPPED),
    (GroupState.READY, "drop", GroupState.DROPPED),
    (GroupState.READY, "reserve", GroupState.RESERVED),
    (GroupState.RESERVED, "consume", GroupState.CONSUMED),
    (GroupState.RESERVED, "take_back", GroupState.RESERVED),
    (GroupState.CONSUMED, "take_back", GroupState.RESERVED),
    # rollout: partial waits for an engine with its tokens kept
    (RolloutState.PENDING, "start", RolloutState.GENERATING),
    (RolloutState.PARTIAL, "start", RolloutState.GENERATING),
    (RolloutState.GENERATING, "append", RolloutState.GENERATING),
    (RolloutState.GENERATING, "release", RolloutState.PARTIAL),
    (RolloutState.GENERATING, "finish", RolloutState.FINISHED),
    (RolloutState.FINISHED, "score", RolloutState.SCORED),
    (RolloutState.FINISHED, "fail", RolloutState.FAILED),
    # step: the redo log
    (StepState.RECORDED, "apply", StepState.APPLIED),
    (StepState.APPLIED, "confirm", StepState.APPLIED),
    (StepState.RECORDED, "void", StepState.VOID),
    (StepState.APPLIED, "void", StepState.VOID),
    # version: published again after every engine start
    (VersionState.TRAINED, "publish", VersionState.PUBLISHED),
    (VersionState.PUBLISHED, "publish", VersionState.PUBLISHED),
    (VersionState.TRAINED, "lose", VersionState.LOST),
    (VersionState.PUBLISHED, "lose", VersionState.LOST),
    # checkpoint: files before the row going in, row before the files going out
    (CheckpointState.WRITING, "commit", CheckpointState.COMMITTED),
    (CheckpointState.COMMITTED, "reject", CheckpointState.BAD),
    (CheckpointState.WRITING, "delete", CheckpointState.DELETING),
    (CheckpointState.COMMITTED, "delete", CheckpointState.DELETING),
    (CheckpointState.BAD, "delete", CheckpointState.DELETING),
)


def rows(noun: type[State]) -> tuple[tuple[State, str, State], ...]:
    """The part of the table that speaks of one enum."""
    return tuple((noun(old), event, noun(new)) for old, event, new in TABLE if isinstance(old, noun))


def sources(noun: type[State], event: str) -> tuple[State, ...]:
    """The states from which `event` is legal. Raises KeyError for an event that the noun does not have."""
    found = tuple(old for old, name, _ in rows(noun) if name == event)
    if not found:
        raise KeyError(f"{noun.__name__} has no event {event!r}")
    return found


def target(noun: type[State], event: str) -> State:
    """The state that `event` leads to. Raises KeyError for an event that the noun does not have."""
    (found,) = {new for _, name, new in rows(noun) if name == event} or {None}
    if found is None:
        raise KeyError(f"{noun.__name__} has no event {event!r}")
    return found


def move(state: State, event: str) -> State:
    """The state after `event`. Raises UsageError where the table has no such row."""
    if state not in sources(type(state), event):
        raise UsageError(refusal(state, event))
    return target(type(state), event)


def refusal(state: StrEnum, event: str) -> str:
    """One sentence on why `event` is refused in `state`, and from where it is not."""
    noun = type(state)
    legal = " or ".join(sources(noun, event))
    return f"a {state} {noun_name(noun)} can't {event.replace('_', ' ')}: only a {legal} one can"


def noun_name(noun: type[StrEnum]) -> str:
    """The everyday word for an enum of states: JobState -> job."""
    return noun.__name__.removesuffix("State").lower()


def diagram(nouns: Iterable[type[StrEnum]] = tuple(INITIAL)) -> str:
    """The table as Mermaid state diagrams, one a noun: what the documentation shows is generated from the code."""
    return "\n".join(_diagram(noun) for noun in nouns)


def _diagram(noun: type[StrEnum]) -> str:
    arrows = [f"    {old} --> {new}: {event}" for old, event, new in rows(noun)]
    final = [f"    {state} --> [*]" for state in noun if not any(old == state for old, _, _ in rows(noun))]
    lines = [f"%% {noun_name(noun)}", "stateDiagram-v2", f"    [*] --> {INITIAL[noun]}", *arrows, *final]
    return "\n".join(lines) + "\n"
