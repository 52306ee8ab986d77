"""A learner of its own for a short task (audit, export): loaded from a checkpoint, its devices given back at the end."""

import sys
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rlhfd.config import JobConfig, Settings, parse_job
from rlhfd.core import wire
from rlhfd.core.placement import Device, Lease
from rlhfd.core.types import Checkpoint, Epoch, Job
from rlhfd.daemon.context import make_context
from rlhfd.daemon.statedir import StateDir
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.engines.learner import LearnerClient
from rlhfd.engines.process import ChildSpec, spawn
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.frames import learner_settings, threads
from rlhfd.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What a short task needs of the daemon."""

    state: StateDir
    store: Store
    settings: Settings
    supervisor: Supervisor
    epoch: Epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A loaded learner; `step` is the version in memory."""

    context: Context
    client: LearnerClient
    step: int
    numerics: dict[str, str]


@asynccontextmanager
async def replica(bench: Bench, job: Job, checkpoint: Checkpoint | None, task: str) -> AsyncGenerator[Replica]:
    """Load `checkpoint` (None: the start model). Raises UsageError while no device is free."""
    config: JobConfig = parse_job(job.spec)
    devices = bench.supervisor.borrow(1, f"{task} of job {job.id}")
    try:
        context = make_context(
            job, config, Lease(devices={"learner": devices}), bench.state, bench.store, bench.settings, bench.epoch
        )
        child = await spawn(_spec(context, devices, task))
        await bench.store.children.record_child(job.id, child)
        try:
            client = await LearnerClient.connect(child, bench.epoch, bench.settings.deadlines)
            loaded = await client.load(
                wire.Load(
                    model_dir=str(context.model_dir),
                    checkpoint_dir=None if checkpoint is None else checkpoint.dir,
                    settings=learner_settings(context),
                    threads=threads(context),
                )
            )
            yield Replica(context=context, client=client, step=loaded.step, numerics=loaded.numerics)
        finally:
            await child.terminate(grace=5.0)
            await bench.store.children.forget_child(child)
    finally:
        bench.supervisor.give_back(devices)


def _spec(context: Context, devices: tuple[Device, ...], task: str) -> ChildSpec:
    return ChildSpec(
        role=task,
        job_id=context.job_id,
        attempt=context.attempt,
        epoch=context.epoch,
        argv=(sys.executable, "-m", "rlhfd.workers.learner"),
        log_path=context.job_dir / "logs" / f"{task}.{uuid.uuid4().hex[:8]}.log",
        cores=tuple(core for device in devices for core in device.cores) or None,
        gpus=tuple(device.id for device in devices if device.kind == "gpu"),
        channel=True,
    )
