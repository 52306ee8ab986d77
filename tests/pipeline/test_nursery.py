"""Every child is in the table while it lives; a start that is cancelled, or can't be recorded, leaves no process."""

import asyncio
import sys

import pytest

from rlhfd.core import procfs
from rlhfd.engines.process import Child, ChildSpec
from rlhfd.errors import DiskFullError, EngineStartError
from rlhfd.pipeline import nursery as module
from rlhfd.pipeline.nursery import Nursery
from rlhfd.store import children
from tests.pipeline.workshop import Workshop


def spec(shop: Workshop) -> ChildSpec:
    return ChildSpec(
        role="sleeper",
        job_id=shop.job.id,
        attempt=1,
        epoch=shop.context.epoch,
        argv=(sys.executable, "-c", "import signal; signal.pause()"),
        log_path=shop.context.job_dir / "logs" / "sleeper.log",
        channel=True,
    )


async def recorded(shop: Workshop) -> int:
    return await shop.db.read(lambda connection: connection.execute("SELECT count(*) FROM child").fetchone()[0])


async def test_a_child_is_recorded_until_it_is_gone(shop: Workshop):
    nursery = Nursery(shop.db)
    child = await nursery.spawn(spec(shop))
    assert await recorded(shop) == 1
    await child.kill()
    child.close_channel()
    await nursery.close()
    assert await recorded(shop) == 0


async def test_a_start_that_is_cancelled_leaves_nobody(shop: Workshop, monkeypatch: pytest.MonkeyPatch):
    """The process is there, its row is being written, and its user is told to stop."""
    nursery, made, writing = Nursery(shop.db), [], asyncio.Event()
    spawn, record = module.spawn, children.record_child

    async def spawned(what: ChildSpec) -> Child:
        made.append(await spawn(what))
        return made[0]

    async def recording(*args: object) -> None:
        writing.set()
        await record(*args)

    monkeypatch.setattr(module, "spawn", spawned)
    monkeypatch.setattr(module.children, "record_child", recording)
    starting = asyncio.create_task(nursery.spawn(spec(shop)))
    await writing.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made[0].status is not None
    assert procfs.start_ticks(made[0].pid) is None
    await nursery.close()
    assert await recorded(shop) == 0


async def test_one_that_can_not_be_recorded_is_ended(shop: Workshop, monkeypatch: pytest.MonkeyPatch):
    nursery, made, spawn = Nursery(shop.db), [], module.spawn

    async def spawned(what: ChildSpec) -> Child:
        made.append(await spawn(what))
        return made[0]

    async def full(*_: object) -> None:
        raise DiskFullError("no room")

    monkeypatch.setattr(module, "spawn", spawned)
    monkeypatch.setattr(module.children, "record_child", full)
    with pytest.raises(DiskFullError):
        await nursery.spawn(spec(shop))
    assert made[0].status is not None


async def test_a_cancelled_start_that_fails_by_itself_is_a_cancelled_one(shop: Workshop):
    go = asyncio.Event()

    async def start() -> Child:
        await go.wait()
        raise EngineStartError("no such program")

    starting = asyncio.create_task(Nursery(shop.db).whole(start()))
    await asyncio.sleep(0)
    starting.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
