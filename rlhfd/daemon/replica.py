"""A learner of its own for a short task (audit, export): loaded from a checkpoint, its devices given back after it."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from rlhfd.config import parse_job
from rlhfd.core import wire
from rlhfd.core.types import Checkpoint, Job
from rlhfd.daemon.context import make_context
from rlhfd.daemon.house import House
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.engines.learner import LearnerClient
from rlhfd.engines.process import ChildSpec
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.frames import learner_settings, threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A loaded learner; `step` is the version in memory."""

    context: Context
    client: LearnerClient
    step: int
    numerics: dict[str, str]


@asynccontextmanager
async def replica(
    house: House, supervisor: Supervisor, job: Job, checkpoint: Checkpoint | None, task: str
) -> AsyncGenerator[Replica]:
    """Load `checkpoint` (None: the start model). Raises UsageError while no device is free."""
    devices = supervisor.borrow(1, f"{task} of job {job.id}")
    try:
        context = make_context(job, parse_job(job.spec), {"learner": devices}, house)
        with closing(context.snapshot):
            child = await house.nursery.spawn(_spec(context, task))
            try:
                client = await LearnerClient.connect(child, house.epoch, house.settings.deadlines)
                loaded = await client.load(_load(context, checkpoint))
                yield Replica(context=context, client=client, step=loaded.step, numerics=loaded.numerics)
            finally:
                await child.terminate(grace=5.0)
                child.close_channel()
    finally:
        supervisor.give_back(devices)


def _load(context: Context, checkpoint: Checkpoint | None) -> wire.Load:
    return wire.Load(
        model_dir=str(context.model_dir),
        checkpoint_dir=None if checkpoint is None else checkpoint.dir,
        settings=learner_settings(context),
        threads=threads(context),
    )


def _spec(context: Context, task: str) -> ChildSpec:
    return ChildSpec(
        role=task,
        job_id=context.job_id,
        attempt=context.attempt,
        epoch=context.epoch,
        argv=(sys.executable, "-m", "rlhfd.workers.learner"),
        log_path=context.log_path(task),
        cores=context.cores("learner"),
        gpus=context.gpus("learner"),
        channel=True,
    )
