"""Rollouts out of a scripted engine: rows, cuts, ends, labels and the gate, over real tables."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlhfd.core.order import request_seed
from rlhfd.core.plan import Generate
from rlhfd.core.types import Group, RolloutState
from rlhfd.engines.vllm import Event, WeightSpan
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, WeightSyncError
from rlhfd.pipeline.generate import ROW, Generator
from rlhfd.store import chunks, groups, versions
from tests.pipeline.workshop import EOS, LIMIT, Workshop


def event(n: int, *, finish: str | None = None, label: str = "1", last: int = 7, at: int = 0) -> Event:
    """n tokens, the last of which is `last`; token i has the log-prob -(at + i)."""
    tokens = array("i", [7] * n)
    if n:
        tokens[-1] = last
    spans = (WeightSpan(version=label, start=0, end=n),) if finish else ()
    return Event(
        tokens=tokens, logps=array("f", [-float(at + i) for i in range(n)]), finish_reason=finish, weight_versions=spans
    )


class Engine:
    """Streams what each request's script says: events, exceptions to raise, events of asyncio to wait for."""

    def __init__(self, *scripts: list) -> None:
        self.scripts = list(scripts)
        self.requests: list[dict] = []
        self.closed = 0

    async def generate(self, **request):
        self.requests.append(request)
        try:
            for item in self.scripts.pop(0):
                match item:
                    case Event():
                        yield item
                    case asyncio.Event():
                        await item.wait()
                    case _:
                        raise item
        finally:
            self.closed += 1


async def in_service(shop: Workshop, engine: Engine) -> Generator:
    generator = Generator(shop.context)
    generator.client, generator.open = engine, True
    generator.version = await versions.latest_trained(shop.db, shop.job.id)
    return generator


async def the_group(shop: Workshop) -> Group:
    (group,) = await shop.admit()
    return group


async def run(shop: Workshop, engine: Engine, group: Group | None = None) -> tuple[Generator, Group]:
    generator, group = await in_service(shop, engine), group or await the_group(shop)
    await generator.generate(Generate(await shop.rollout(group), group))
    return generator, group


async def rows(shop: Workshop, group: Group) -> list[int]:
    return [chunk.n for chunk in await chunks.chunks(shop.db, group.rollouts[0].id)]


async def test_a_row_is_committed_as_soon_as_64_tokens_are_there(shop: Workshop):
    more = asyncio.Event()
    engine = Engine([event(16), event(16), event(48), more, event(20, finish="stop", last=EOS)])
    generator, group = await in_service(shop, engine), await the_group(shop)
    task = asyncio.create_task(generator.generate(Generate(group.rollouts[0], group)))
    await until(lambda: generator.in_flight == 1)
    await next(iter(generator._streams.values())).gained.wait()
    assert await rows(shop, group) == [ROW]
    assert generator.in_flight == 1
    more.set()
    await task
    assert await rows(shop, group) == [ROW, 36]
    done = await shop.rollout(group)
    assert (done.state, done.finish, done.n_tokens) == (RolloutState.FINISHED, "stop", 100)
    assert generator.in_flight == 0


async def test_a_long_event_is_cut_into_rows(shop: Workshop):
    _, group = await run(shop, Engine([event(150), event(10, finish="length")]))
    assert await rows(shop, group) == [64, 64, 32]
    assert (await shop.rollout(group)).finish == "length"


async def test_tokens_and_log_probs_are_stored_as_they_came(shop: Workshop):
    _, group = await run(shop, Engine([event(40), event(40, at=40), event(2, finish="stop", last=EOS, at=80)]))
    data = (await chunks.rollout_data(shop.db, [group.id]))[group.rollouts[0].id]
    assert array("f", data.logps).tolist() == [-float(i) for i in range(82)]
    assert array("i", data.tokens).tolist() == [7] * 81 + [EOS]


async def test_an_abort_leaves_a_partial_rollout_that_goes_on_where_it_stood(shop: Workshop):
    engine = Engine([event(30), event(5, finish="abort")], [event(3, finish="stop", last=EOS)])
    _, group = await run(shop, engine)
    cut = await shop.rollout(group)
    assert (cut.state, cut.n_tokens, cut.finish) == (RolloutState.PARTIAL, 35, None)
    await run(shop, engine, group)
    done = await shop.rollout(group)
    assert (done.state, done.n_tokens, done.resumes) == (RolloutState.FINISHED, 38, 1)
    prompt = list(shop.context.snapshot.row(group.row).tokens)
    first, second = engine.requests
    assert (first["token_ids"], second["token_ids"]) == (prompt, prompt + [7] * 35)
    assert (first["max_tokens"], second["max_tokens"]) == (LIMIT, LIMIT - 35)
    assert [r["seed"] for r in engine.requests] == [request_seed(7, 0, 0, 0), request_seed(7, 0, 0, 35)]
    assert first["stop_token_ids"] == [EOS]
    assert first["request_id"] != second["request_id"]


async def test_a_stream_aborted_right_after_its_end_token_is_finished(shop: Workshop):
    _, group = await run(shop, Engine([event(4, finish="abort", last=EOS)]))
    assert (await shop.rollout(group)).finish == "stop"


async def test_a_stream_aborted_at_the_limit_is_finished(shop: Workshop):
    _, group = await run(shop, Engine([event(LIMIT, finish="abort")]))
    assert (await shop.rollout(group)).finish == "length"


async def test_an_abort_before_the_first_token_loses_nothing(shop: Workshop):
    _, group = await run(shop, Engine([event(0, finish="abort")]))
    cut = await shop.rollout(group)
    assert (cut.state, cut.n_tokens) == (RolloutState.PARTIAL, 0)
    assert await rows(shop, group) == []


@pytest.mark.parametrize("fault", [EngineDiedError("gone"), DeadlineError("no next event")])
async def test_what_came_before_the_engine_broke_is_kept(shop: Workshop, fault: Exception):
    with pytest.raises(type(fault)):
        await run(shop, Engine([event(70), fault]))
    (group,) = await groups.live_groups(shop.db, shop.job.id)
    assert group.rollouts[0].state is RolloutState.PARTIAL
    assert await rows(shop, group) == [64, 6]


async def test_a_stream_that_ends_without_a_reason_is_a_fault(shop: Workshop):
    with pytest.raises(EngineError, match="without a finish reason"):
        await run(shop, Engine([event(3)]))
    (group,) = await groups.live_groups(shop.db, shop.job.id)
    assert group.rollouts[0].n_tokens == 3


async def test_another_label_than_that_of_the_loaded_weights_stops_everything(shop: Workshop):
    with pytest.raises(WeightSyncError, match="version label probe where 1 was loaded"):
        await run(shop, Engine([event(3, finish="stop", label="probe", last=EOS)]))
    (group,) = await groups.live_groups(shop.db, shop.job.id)
    assert group.rollouts[0].n_tokens == 0


async def test_a_cancelled_stream_is_closed_at_once(shop: Workshop):
    engine = Engine([event(10), asyncio.Event()])
    generator, group = await in_service(shop, engine), await the_group(shop)
    task = asyncio.create_task(generator.generate(Generate(group.rollouts[0], group)))
    await until(lambda: any(stream.tokens for stream in generator._streams.values()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.closed == 1
    assert generator.in_flight == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


class TestTheGate:
    async def test_while_it_is_closed_no_request_is_sent(self, shop: Workshop):
        engine, group = Engine(), await the_group(shop)
        generator = await in_service(shop, engine)
        generator.open = False
        await generator.generate(Generate(group.rollouts[0], group))
        assert engine.requests == []
        assert (await shop.rollout(group)).state is RolloutState.PENDING

    async def test_one_that_closes_while_the_rows_are_read_lets_the_rollout_go(self, shop: Workshop):
        engine, group = Engine(), await the_group(shop)
        generator = await in_service(shop, engine)
        task = asyncio.create_task(generator.generate(Generate(group.rollouts[0], group)))
        await until(lambda: generator.in_flight == 1)
        generator.open = False
        await task
        assert engine.requests == []
        assert (await shop.rollout(group)).state is RolloutState.PARTIAL

    async def test_closing_waits_until_every_stream_has_gained_a_row(self, shop: Workshop):
        more = asyncio.Event()
        engine, group = Engine([event(10), more, event(60), asyncio.Event()]), await the_group(shop)
        generator = await in_service(shop, engine)
        stream = asyncio.create_task(generator.generate(Generate(group.rollouts[0], group)))
        await until(lambda: any(s.tokens for s in generator._streams.values()))
        closing = asyncio.create_task(generator.close_gate(patience=30.0))
        await asyncio.sleep(0)
        assert generator.open
        more.set()
        assert await closing
        assert not generator.open
        assert await rows(shop, group) == [ROW]
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)

    async def test_it_closes_all_the_same_when_patience_runs_out(self, shop: Workshop):
        engine, group = Engine([event(10), asyncio.Event()]), await the_group(shop)
        generator = await in_service(shop, engine)
        stream = asyncio.create_task(generator.generate(Generate(group.rollouts[0], group)))
        await until(lambda: any(s.tokens for s in generator._streams.values()))
        assert not await generator.close_gate(patience=0.0)
        assert not generator.open
        with pytest.raises(DeadlineError, match="1 streams did not end"):
            await generator.drained(deadline=0.0)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        await generator.drained(deadline=1.0)

    async def test_with_no_stream_it_closes_at_once(self, shop: Workshop):
        generator = await in_service(shop, Engine())
        assert await generator.close_gate(patience=0.0)
        assert not generator.open


async def test_a_lost_engine_takes_no_requests(shop: Workshop):
    engine, group = Engine(), await the_group(shop)
    generator = await in_service(shop, engine)
    generator.out_of_service()
    await generator.generate(Generate(group.rollouts[0], group))
    assert engine.requests == []
    assert not generator.open


async def test_a_rollout_that_has_all_its_tokens_is_only_finished(shop: Workshop):
    """Its last row was committed and the daemon died before the finish: no request of 0 tokens is made."""
    shop.context = replace(
        shop.context,
        config=shop.context.config.model_copy(
            update={"rollout": shop.context.config.rollout.model_copy(update={"max_completion_length": 64})}
        ),
    )
    engine = Engine([event(64), EngineDiedError("gone")])
    _, group = await run_with_fault(shop, engine)
    done = await shop.rollout(group)
    assert (done.state, done.finish) == (RolloutState.FINISHED, "length")
    assert len(engine.requests) == 1


async def run_with_fault(shop: Workshop, engine: Engine) -> tuple[Generator, Group]:
    generator, group = await in_service(shop, engine), await the_group(shop)
    with pytest.raises(EngineDiedError):
        await generator.generate(Generate(group.rollouts[0], group))
    return generator, group
