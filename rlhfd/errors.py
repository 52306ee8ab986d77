"""Every error rlhfd raises on purpose, one tree; `exit_status` is what the CLI ends with.

RlhfdError                     1
├─ UsageError                 64  a transition that the state forbids, bad usage
│  └─ UnknownJobError         64  no job has this id
├─ StateError                 65  damaged or foreign state
├─ NoDaemonError              69
├─ StorageError               74  I/O
│  └─ DiskFullError           74  retryable: pause, go on when there is room
├─ AlreadyRunningError        75
├─ NotPermittedError          77
├─ JobFileError               78  a bad job file, or anything that it names
├─ DeadlineError               1  retryable: a wait ran out; names what it waited for
├─ RewardError                 1  one reward of one rollout failed; its rollout leaves the group
├─ EngineError                 1  a child process: retryable by a restart
│  ├─ EngineStartError         1  it died, or did not answer, before it was ready
│  ├─ EngineDiedError          1  it died in mid-run
│  └─ EngineRequestError       1  it refused one request; a restart would not help
├─ LearnerFault                1  the learner answered with a fault
│  ├─ NonFiniteError           1  NaN or Inf, with the rollouts named
│  ├─ BadCheckpointError      65  does not verify or fit: take the one before
│  └─ OutOfMemoryError         1
├─ WeightSyncError             1  what the generator serves is not what was trained
└─ ReplayDivergedError         1  a replayed step did not reproduce its fingerprint

The message is one sentence: what, where, and what to do.
"""

from collections.abc import Sequence
from typing import ClassVar


class RlhfdError(Exception):
    """Root of the tree. The message is shown to the user as it is."""

    exit_status: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class UsageError(RlhfdError):
    """A transition that the job's state forbids, or a command used wrongly."""

    exit_status = 64


class UnknownJobError(UsageError):
    """No job has this id."""


class StateError(RlhfdError):
    """The state directory is damaged, newer than this rlhfd, or not rlhfd's."""

    exit_status = 65


class NoDaemonError(RlhfdError):
    """No daemon answers on any of the sockets looked at."""

    exit_status = 69


class StorageError(RlhfdError):
    """The disk failed: the outcome of the last write is unknown."""

    exit_status = 74


class DiskFullError(StorageError):
    """No room: nothing was written; the job pauses until there is space."""

    retryable = True


class AlreadyRunningError(RlhfdError):
    """Another daemon holds the lock or answers on the socket."""

    exit_status = 75


class NotPermittedError(RlhfdError):
    """The peer may not change anything here."""

    exit_status = 77


class JobFileError(RlhfdError):
    """A bad job file, or anything that it names."""

    exit_status = 78


class DeadlineError(RlhfdError):
    """A wait ran out of time; the message names what it waited for."""

    retryable = True


class RewardError(RlhfdError):
    """One reward of one rollout raised, hung, or returned something that is no finite number."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind  # "exception" | "timeout" | "not_finite" | "wrong_type" | "died"


class EngineError(RlhfdError):
    """A child process failed; a restart may help."""

    retryable = True


class EngineStartError(EngineError):
    """The child died, or did not answer, before it was ready; carries its last log lines."""


class EngineDiedError(EngineError):
    """The child died in mid-run."""


class EngineRequestError(EngineError):
    """The engine refused one request as it stands (too long, a token it does not know): sent again, it fails again."""

    retryable = False


class LearnerFault(RlhfdError):  # noqa: N818  the wire's word for it
    """The learner answered with a fault instead of a result; `trace` is the child's traceback, if any."""

    def __init__(self, message: str, *, rollout_ids: Sequence[int] = (), trace: str = "") -> None:
        super().__init__(message)
        self.rollout_ids = tuple(rollout_ids)
        self.trace = trace


class NonFiniteError(LearnerFault):
    """NaN or Inf in a log-prob, loss or gradient; the message names the rollouts. The step is not applied."""


class BadCheckpointError(LearnerFault):
    """A checkpoint does not verify against its manifest, or does not fit the model: the one before it is taken."""

    exit_status = 65


class OutOfMemoryError(LearnerFault):
    """The learner ran out of memory."""


class WeightSyncError(RlhfdError):
    """The generator does not serve the weights that were trained (invariant 6)."""


class ReplayDivergedError(RlhfdError):
    """A replayed step did not reproduce its recorded fingerprint."""
