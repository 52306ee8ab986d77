"""Carriers, in the order in which the data lives: job, prompt, group, rollout, chunk, step, version, checkpoint.

Numbers: steps count from 1 and version 0 is the start model; step n starts from version n-1 and makes version n.
A `VersionId` names exact weights and is only compared for equality; staleness is a difference of `VersionStep`s.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NewType

JobId = NewType("JobId", int)
GroupId = NewType("GroupId", int)
RolloutId = NewType("RolloutId", int)
StepId = NewType("StepId", int)
VersionId = NewType("VersionId", int)
CheckpointId = NewType("CheckpointId", int)
Ordinal = NewType("Ordinal", int)
VersionStep = NewType("VersionStep", int)
Epoch = NewType("Epoch", int)


class JobState(StrEnum):
    """Where a job stands; only `running` holds devices."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Desired(StrEnum):
    """What its owner asked for last."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class GroupState(StrEnum):
    """open: being generated or scored; ready: complete and scored; reserved: in a recorded step."""

    OPEN = "open"
    READY = "ready"
    RESERVED = "reserved"
    CONSUMED = "consumed"
    DROPPED = "dropped"


class RolloutState(StrEnum):
    """failed: a reward gave no number; the group is complete without it."""

    PENDING = "pending"
    GENERATING = "generating"
    PARTIAL = "partial"
    FINISHED = "finished"
    SCORED = "scored"
    FAILED = "failed"


class StepState(StrEnum):
    """recorded: planned, durable, not learned yet; void: a replay diverged at or before it."""

    RECORDED = "recorded"
    APPLIED = "applied"
    VOID = "void"


class VersionState(StrEnum):
    """published: the engine has run these weights; lost: a replay could not make them again."""

    TRAINED = "trained"
    PUBLISHED = "published"
    LOST = "lost"


class CheckpointState(StrEnum):
    """writing: files may be there; committed: durable and verified; bad: failed verification."""

    WRITING = "writing"
    COMMITTED = "committed"
    DELETING = "deleting"
    BAD = "bad"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One row of `job`. `spec` is the resolved job as plain data, `facts` what the inspection found."""

    id: JobId
    name: str
    spec: dict[str, Any]
    facts: dict[str, Any]
    state: JobState
    desired: Desired
    priority: int
    after_id: JobId | None
    owner_epoch: Epoch | None
    attempt: int
    idle_attempts: int
    step: int
    max_steps: int
    noise: float | None
    reason: str | None
    created_us: int
    updated_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the snapshot. `text`: JSON of the string or messages; `columns`: JSON object of the row's extras."""

    row: int
    tokens: tuple[int, ...]
    text: str
    columns: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One completion of a group. Lengths in tokens; `min_step`, `max_step`: of the versions that sampled it."""

    id: RolloutId
    group_id: GroupId
    k: int
    state: RolloutState
    n_tokens: int = 0
    min_step: VersionStep | None = None
    max_step: VersionStep | None = None
    resumes: int = 0
    finish: str | None = None
    reward: float | None = None
    parts: dict[str, float] | None = None
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt and its rollouts, ordered by k. `deadline` D: the last version that a step may train it from."""

    id: GroupId
    ordinal: Ordinal
    row: int
    deadline: VersionStep
    state: GroupState
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Committed tokens of a rollout, sampled under ONE version. tokens int32 [n], logps float32 [n], as bytes."""

    rollout_id: RolloutId
    start: int
    version_id: VersionId
    version_step: VersionStep
    tokens: bytes
    logps: bytes

    @property
    def n(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One row of `policy_version`."""

    id: VersionId
    step: VersionStep
    state: VersionState
    parent_id: VersionId | None = None
    fingerprint: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRollout:
    """How a recorded step uses one rollout."""

    rollout_id: RolloutId
    group_id: GroupId
    advantage: float
    minibatch: int
    micro_batch: int
    masked: bool
    skipped: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One entry of the redo log: `groups` and `rollouts` in training order; settings as in wire.StepSettings.

    `version_in` is None only in a step that was recorded again behind another one and waits for that one's version.
    """

    id: StepId
    n: int
    state: StepState
    version_in: VersionId | None
    version_out: VersionId | None
    seed: int
    settings: dict[str, Any]
    numerics: dict[str, str]
    fingerprint: dict[str, Any] | None
    groups: tuple[GroupId, ...]
    rollouts: tuple[StepRollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One row of `checkpoint`; `step` is its version's."""

    id: CheckpointId
    version_id: VersionId
    step: VersionStep
    dir: str
    manifest_sha: str | None
    nbytes: int | None
    state: CheckpointState


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something a person may want to know; `us` is µs UTC."""

    id: int
    job_id: JobId | None
    epoch: Epoch
    us: int
    kind: str
    body: dict[str, Any]
