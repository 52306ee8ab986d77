"""`rlhfd export`: a plain Hugging Face directory of a checkpointed version."""

import shutil
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rlhfd.core import wire
from rlhfd.core.types import Checkpoint, JobId
from rlhfd.daemon.house import House
from rlhfd.daemon.replica import replica
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.errors import UsageError
from rlhfd.store import checkpoints, jobs


@asynccontextmanager
async def exported(house: House, supervisor: Supervisor, job_id: JobId, version: int | None) -> AsyncGenerator[Path]:
    """The directory, there while the context is open. Raises UsageError for a version without a checkpoint."""
    job = await jobs.job(house.db, job_id)
    checkpoint = _choose(await checkpoints.newest_valid(house.db, job_id), job_id, version)
    target = house.state.root / "tmp" / f"export-{uuid.uuid4().hex}"
    try:
        async with replica(house, supervisor, job, checkpoint, "export") as held:
            await held.client.export(wire.Export(dir=str(target)))
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _choose(kept: Sequence[Checkpoint], job_id: JobId, version: int | None) -> Checkpoint | None:
    """The newest, or that of a version; None stands for version 0, the start model."""
    if version == 0:
        return None
    found = [checkpoint for checkpoint in kept if version is None or checkpoint.step == version]
    if found:
        return found[0]
    have = ", ".join(str(checkpoint.step) for checkpoint in kept) or "none"
    what = "no checkpoint yet" if version is None else f"no checkpoint of version {version}"
    raise UsageError(f"job {job_id} has {what}; kept: {have}, and 0 (the start model)")
