"""The loop of a job around scripted parts: whose fault a failure is, and what a wind-down does not forget."""

import asyncio

import pytest

from rlhfd.core.plan import Learn
from rlhfd.errors import EngineDiedError, NonFiniteError, WeightSyncError
from rlhfd.pipeline.run import JobRun, Stop
from tests.pipeline.workshop import Workshop

pytestmark = pytest.mark.timeout(60)


class Pool:
    """Rewards that never come up."""

    async def start(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return None


@pytest.fixture
async def run(shop: Workshop) -> JobRun:
    return JobRun(shop.context, Pool())


async def ended(run: JobRun, error: BaseException, life: int | None = None) -> None:
    """As if an effect, begun in this life of its child, had ended so."""

    async def effect() -> None:
        raise error

    action = Learn(1)
    task = asyncio.create_task(effect())
    run._tasks[action.key] = task
    await asyncio.wait({task})
    run._ended(action.key, task, run._crew.life(action.key) if life is None else life)


async def test_a_lost_child_is_its_keepers_business(run: JobRun):
    await ended(run, EngineDiedError("gone"))
    assert run._failure is None
    assert run._crew._keepers["learner"]._suspected.is_set()


async def test_a_late_failure_on_a_dead_child_spares_the_next(run: JobRun):
    run._crew._keepers["learner"].life = 2
    await ended(run, EngineDiedError("of the first"), life=1)
    assert run._failure is None
    assert not run._crew._keepers["learner"]._suspected.is_set()


async def test_every_other_failure_is_the_jobs(run: JobRun):
    await ended(run, WeightSyncError("stale"))
    with pytest.raises(WeightSyncError):
        await run.run()


@pytest.mark.parametrize("stop", [Stop.PAUSE, Stop.DRAIN, Stop.CANCEL])
async def test_one_that_is_still_starting_ends_as_it_was_asked(run: JobRun, stop: Stop):
    going = asyncio.create_task(run.run())
    await asyncio.sleep(0)
    run.ask(stop)
    assert await going is stop


async def test_a_failure_while_it_winds_down_is_not_forgotten(run: JobRun, monkeypatch: pytest.MonkeyPatch):
    async def wind_down() -> None:
        await ended(run, NonFiniteError("rollouts 3, 4"))

    monkeypatch.setattr(run, "_wind_down", wind_down)
    run.ask(Stop.PAUSE)
    with pytest.raises(NonFiniteError, match="rollouts 3, 4"):
        await run.run()


async def test_an_engine_waits_for_a_learner_that_died_under_its_probe(run: JobRun, monkeypatch: pytest.MonkeyPatch):
    crew, answers, probed = run._crew, [EngineDiedError("gone"), "probe"], asyncio.Event()

    async def probe():
        probed.set()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(crew.learner, "probe", probe)
    crew._learner_up.set()
    probing = asyncio.create_task(crew._probe())
    await probed.wait()
    await asyncio.sleep(0)
    assert not probing.done()
    assert crew._keepers["learner"]._suspected.is_set()
    crew._learner_up.set()
    assert await probing == "probe"
