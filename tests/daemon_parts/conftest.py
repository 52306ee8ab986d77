"""A daemon's house over a real state directory and database, whose jobs' runs are in the hands of the test."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhfd.config import Settings
from rlhfd.core.placement import Device
from rlhfd.core.types import Job
from rlhfd.daemon import supervisor as module
from rlhfd.daemon.house import House
from rlhfd.daemon.service import DaemonService
from rlhfd.daemon.statedir import StateDir
from rlhfd.daemon.submit import Desk
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.nursery import Nursery
from rlhfd.pipeline.run import Stop
from rlhfd.store import epochs, events, jobs
from rlhfd.store.db import Database
from tests.pipeline.workshop import job_spec, write_snapshot

SHA = "a" * 64


class Run:
    """Stands for a JobRun: goes on until the test lets it end, or it is asked to."""

    made: ClassVar[list["Run"]] = []

    def __init__(self, context: Context, pool: object) -> None:
        self.context, self.phase = context, "generating"
        self.asked: Stop | None = None
        self.end: asyncio.Future[Stop | None] = asyncio.get_running_loop().create_future()
        self.winds_down: asyncio.Event | None = None
        Run.made.append(self)

    def ask(self, stop: Stop) -> None:
        self.asked = stop
        if not self.end.done():
            self.end.set_result(stop)

    def finish(self) -> None:
        self.end.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.end.set_exception(error)

    async def run(self) -> Stop | None:
        stop = await self.end
        if self.winds_down is not None:
            await self.winds_down.wait()
        return stop


class Site:
    """The daemon's parts, and words for what tests do with them."""

    def __init__(self, house: House, devices: list[Device]) -> None:
        self.house, self.devices = house, devices
        self.supervisor = Supervisor(house)
        self.service = DaemonService(house=house, desk=Desk(house=house), supervisor=self.supervisor)
        self.task: asyncio.Task[None] | None = None
        self.keys = 0

    def start(self) -> None:
        self.task = asyncio.create_task(self.supervisor.run())

    async def submit(
        self, *, priority: int = 0, after: int | None = None, resources: dict[str, Any] | None = None
    ) -> Job:
        self.keys += 1
        facts = {
            "model": {"dir": "/nowhere", "parameters": 10, "eos_token_ids": [2], "max_model_len": 256},
            "prompts": {"sha256": SHA, "rows": 8, "columns": ["answer"]},
            "canary": [[1, 2, 3]],
            "files": {"rewards.py": "b" * 64},
        }
        submission = jobs.Submission(
            submit_key=str(self.keys),
            name=f"job {self.keys}",
            spec=job_spec(resources=resources or {"generator": 1, "learner": 1}),
            spec_sha="5",
            facts=facts,
            max_steps=4,
            priority=priority,
            after=after,
        )
        job, _ = await jobs.submit(self.house.db, submission)
        self.supervisor.poke()
        return job

    async def state(self, job_id: int) -> tuple[str, str | None]:
        job = await jobs.job(self.house.db, job_id)
        return job.state.value, job.reason

    async def until(self, job_id: int, kind: str, **body: object) -> None:
        """Until the job has an event of this kind with these values."""
        after = 0
        async with asyncio.timeout(10):
            while True:
                for event in await events.wait_newer(self.house.db, job_id, after, 10.0):
                    after = event.id
                    if event.kind == kind and body.items() <= event.body.items():
                        return

    async def running(self, job_id: int) -> Run:
        """Its run, once it has begun."""
        await self.until(job_id, "started")
        async with asyncio.timeout(10):
            while not any(r.context.job_id == job_id and not r.end.done() for r in Run.made):
                await asyncio.sleep(0)
        return next(r for r in reversed(Run.made) if r.context.job_id == job_id)

    async def settled(self, job_id: int, state: str) -> None:
        """Until the job is in a state and its devices are free."""
        await self.until(job_id, "state", state=state)
        async with asyncio.timeout(10):
            while self.supervisor.devices(job_id):
                await asyncio.sleep(0)


def cores(count: int) -> list[Device]:
    return [Device(id=f"cpu:{n}", kind="cpu", name="core", memory=0, cores=(n,)) for n in range(count)]


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(module, "JobRun", Run)
    monkeypatch.setattr(Run, "made", [])
    state = StateDir.take(tmp_path / "state")
    write_snapshot(state.prompts(SHA))
    devices = cores(2)
    async with await Database.open(state.database, window=0.0005) as db:
        db.use_reserve = state.drop_ballast
        epoch = await epochs.begin_epoch(db, pid=1, boot_id="boot", version="0.1")
        house = House(
            state=state,
            db=db,
            settings=Settings(),
            epoch=epoch,
            nursery=Nursery(db),
            cache=tmp_path / "cache",
            inventory=lambda: devices,
        )
        made = Site(house, devices)
        yield made
        await made.supervisor.drain()
        if made.task is not None:
            made.task.cancel()
            await asyncio.gather(made.task, return_exceptions=True)
    state.lock.close()
