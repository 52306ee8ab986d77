"""One child kept alive: up, lost, up again with a growing pause, given up after the limit."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from rlhfd.errors import DeadlineError, EngineDiedError, EngineRequestError, LearnerFault
from rlhfd.pipeline import keeper as module
from rlhfd.pipeline.keeper import LIMIT, Keeper
from rlhfd.store import events
from tests.pipeline.workshop import Workshop

pytestmark = pytest.mark.timeout(30)


class Child:
    """Ends when it is told to."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.told: list[str] = []

    def die(self, status: int = 137) -> None:
        if not self.end.done():
            self.end.set_result(status)

    async def wait(self) -> int:
        return await asyncio.shield(self.end)

    async def terminate(self, grace: float) -> int:
        self.told.append("terminate")
        self.die(143)
        return await self.wait()

    async def kill(self) -> int:
        self.told.append("kill")
        self.die()
        return await self.wait()

    def close_channel(self) -> None:
        self.told.append("closed")

    def tail(self, lines: int) -> str:
        return "last words"


class House:
    """A keeper with children that the test has in hand."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self.children: list[Child] = []
        self.fault: Exception | None = None
        self.up, self.lost = asyncio.Semaphore(0), 0
        self.hang: asyncio.Event | None = None
        self.keeper = Keeper(shop.context, "learner", self.spawn, self.bring_up, self.on_loss)
        self.task = asyncio.create_task(self.keeper.run())

    async def spawn(self) -> Child:
        self.children.append(Child(len(self.children) + 1))
        return self.children[-1]

    async def bring_up(self, child: Child) -> None:
        if self.hang is not None:
            self.up.release()
            await self.hang.wait()
        if self.fault is not None:
            raise self.fault
        self.up.release()

    def on_loss(self) -> None:
        self.lost += 1

    async def ready(self) -> Child:
        """Until a child is in service and its keeper waits for its end."""
        await self.up.acquire()
        after = 0
        while True:
            for event in await events.wait_newer(self.shop.db, self.shop.job.id, after, 10.0):
                after = event.id
                if event.kind == "learner_ready" and event.body["pid"] == len(self.children):
                    return self.children[-1]

    async def losses(self) -> list[dict]:
        found = await events.after(self.shop.db, self.shop.job.id, 0)
        return [event.body for event in found if event.kind == "learner_lost"]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the keeper would have slept."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    class Asyncio:
        def __getattr__(self, name: str):
            return sleep if name == "sleep" else getattr(asyncio, name)

    monkeypatch.setattr(module, "asyncio", Asyncio())
    return slept


@pytest.fixture
async def house(shop: Workshop, pauses: list[float]) -> AsyncIterator[House]:
    made = House(shop)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_a_child_that_ends_is_followed_by_another(house: House):
    (await house.ready()).die()
    second = await house.ready()
    assert second is house.children[1]
    assert house.lost == 1
    (loss,) = await house.losses()
    assert loss["why"] == "the learner ended (SIGKILL); the end of its log:\nlast words"
    assert house.children[0].told == ["terminate", "closed"]


async def test_a_suspect_is_killed_and_replaced(house: House):
    first = await house.ready()
    house.keeper.suspect(DeadlineError("no frame came"), house.keeper.life)
    await house.ready()
    assert first.told == ["kill", "closed"]
    assert (await house.losses())[0]["why"] == "no frame came"


async def test_a_child_that_broke_off_because_it_died_is_told_by_its_log(house: House):
    first = await house.ready()
    house.keeper.suspect(EngineDiedError("the learner broke off"), house.keeper.life)
    first.die(1)
    await house.ready()
    assert (await house.losses())[0]["why"] == "the learner ended (exit status 1); the end of its log:\nlast words"


async def test_a_child_that_broke_off_and_lives_is_told_by_what_was_seen(house: House, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LAST_WORDS", 0.01)
    first = await house.ready()
    house.keeper.suspect(EngineDiedError("the learner broke off"), house.keeper.life)
    await house.ready()
    assert first.told == ["kill", "closed"]
    assert (await house.losses())[0]["why"] == "the learner broke off"


async def test_a_late_word_about_an_earlier_child_spares_its_successor(house: House):
    (await house.ready()).die()
    second = await house.ready()
    house.keeper.suspect(EngineDiedError("of the first"), house.keeper.life - 1)
    second.die()
    await house.ready()
    assert second.told == ["terminate", "closed"]
    assert "the learner ended" in (await house.losses())[1]["why"]


async def test_the_pause_doubles_and_after_the_limit_the_last_error_is_raised(house: House, pauses: list[float]):
    for _ in range(LIMIT):
        (await house.ready()).die()
    with pytest.raises(EngineDiedError, match="the learner ended"):
        await house.task
    first = house.shop.context.settings.restart_pause
    assert pauses == [first, 2 * first, 4 * first, 8 * first]
    assert len(house.children) == LIMIT


async def test_losses_with_a_step_between_them_do_not_add_up(house: House):
    for _ in range(LIMIT + 2):
        (await house.ready()).die()
        house.keeper.losses = 0
    assert not house.task.done()


async def test_a_request_that_would_fail_again_is_not_tried_with_a_fresh_child(house: House):
    await house.ready()
    house.keeper.suspect(EngineRequestError("refused with 400"), house.keeper.life)
    with pytest.raises(EngineRequestError, match="refused with 400"):
        await house.task
    assert len(house.children) == 1


async def test_a_bring_up_is_given_up_as_soon_as_the_child_is_gone(house: House):
    first = await house.ready()
    house.hang = asyncio.Event()
    first.die()
    await house.up.acquire()  # the bring-up of the second has begun, and hangs
    house.children[1].die(1)
    await house.up.acquire()
    assert len(house.children) == 3
    assert "exit status 1" in (await house.losses())[1]["why"]


async def test_a_fault_of_the_bring_up_that_a_restart_does_not_mend_ends_the_child(house: House):
    first = await house.ready()
    house.fault = LearnerFault("the model does not fit")
    first.die()
    with pytest.raises(LearnerFault, match="does not fit"):
        await house.task
    assert house.children[1].told == ["terminate", "closed"]


async def test_a_cancelled_keeper_ends_its_child(house: House):
    child = await house.ready()
    house.task.cancel()
    await asyncio.gather(house.task, return_exceptions=True)
    assert child.told == ["terminate", "closed"]
    assert house.lost == 1
