"""Faults of a worker and errors of the daemon are the same things on two sides of the wire: one table, both ways."""

import errno
from collections.abc import Mapping

from rlhfd.core.wire import Fault, FaultKind
from rlhfd.errors import (
    BadCheckpointError,
    DiskFullError,
    JobFileError,
    LearnerFault,
    NonFiniteError,
    OutOfMemoryError,
    RlhfdError,
    StorageError,
)

FAULTS: Mapping[FaultKind, type[RlhfdError]] = {  # a class before its base
    "non_finite": NonFiniteError,
    "out_of_memory": OutOfMemoryError,
    "bad_model": JobFileError,
    "bad_checkpoint": BadCheckpointError,
    "disk_full": DiskFullError,
    "io": StorageError,
    "bug": LearnerFault,
}
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})  # an OSError's number that says: the disk is full
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def fault_of(error: Exception, trace: str) -> Fault:
    """What a worker answers instead of a result; an error that nobody foresaw is a bug and carries its traceback."""
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _is_out_of_memory(error)):
        return Fault(kind="out_of_memory", message=f"the learner is out of memory: {error}", trace=trace)
    kind = _kind(error)
    message = str(error) if isinstance(error, RlhfdError) else f"{type(error).__name__}: {error}"
    rollout_ids = list(error.rollout_ids) if isinstance(error, LearnerFault) else []
    return Fault(kind=kind, message=message, rollout_ids=rollout_ids, trace=trace)


def error_of(fault: Fault, what: str) -> RlhfdError:
    """What the daemon raises for it; `what` names the call."""
    cls = FAULTS[fault.kind]
    message = f"{what}: {fault.message}"
    if issubclass(cls, LearnerFault):
        return cls(message, rollout_ids=fault.rollout_ids, trace=fault.trace)
    return cls(message)


def _kind(error: Exception) -> FaultKind:
    for kind, cls in FAULTS.items():
        if isinstance(error, cls):
            return kind
    return "bug"


def _is_out_of_memory(error: RuntimeError) -> bool:
    return any(sign in str(error) for sign in OUT_OF_MEMORY)
