"""What rlhfd relies on in a generator, asked of the real vLLM server and of the fake alike."""

import asyncio
import json
import shutil
from array import array
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rlhfd.engines.vllm import EngineDeadlines, Event, VllmClient, WeightSpan
from rlhfd.engines.vllm_server import VllmServer
from rlhfd.errors import DeadlineError, EngineError, EngineRequestError
from rlhfd.testing.llama import Llama, log_softmax
from tests.conftest import run_python, tiny_server_spec
from tests.engines.publications import publish

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [1, 442, 268, 202, 38, 319, 341, 224, 283, 72]
CANARY = [[(i * 37 + 11) % 512 for i in range(150)], PROMPT]
FP32 = 2e-5  # nats
INTERVAL = 16


@dataclass(frozen=True, kw_only=True)
class Published:
    """base: the start model; moved: 5 % of noise on every tensor; headless: the same without lm_head."""

    base: Path
    moved: Path
    headless: Path


@dataclass(frozen=True, kw_only=True)
class Completion:
    tokens: list[int]
    logps: list[float]
    sizes: list[int]
    finish: str | None
    spans: tuple[WeightSpan, ...]


@pytest.fixture(scope="session")
def published(tmp_path_factory, tiny_model):
    root = tmp_path_factory.mktemp("published")
    return Published(
        base=publish(tiny_model, root / "base"),
        moved=publish(tiny_model, root / "moved", noise=0.05),
        headless=publish(tiny_model, root / "headless", noise=0.05, head=False),
    )


@pytest.fixture(scope="session")
def reference(tmp_path_factory, published):
    """Canary log-probs by transformers, for base and moved."""
    request = tmp_path_factory.mktemp("reference") / "request.json"
    models = [{"model": str(d), "sequences": CANARY} for d in (published.base, published.moved)]
    request.write_text(json.dumps(models))
    base, moved = json.loads(run_python("tests/reference_logprobs.py", request))
    return {"base": base, "moved": moved}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fake_server(tmp_path_factory, tiny_model):
    spec = tiny_server_spec(tmp_path_factory.mktemp("fake"), tiny_model, module="rlhfd.testing.engine")
    server = await VllmServer.start(spec)
    yield server
    await server.stop()


@pytest.fixture(scope="session", params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
def server(request) -> VllmServer:
    return request.getfixturevalue({"fake": "fake_server", "real": "vllm_server"}[request.param])


@pytest_asyncio.fixture(loop_scope="session")
async def client(server, published):
    """The engine as new: nothing in flight, the start model's weights."""
    client = server.client
    await load(client, published.base, "base")
    yield client
    await client.resume()


async def load(client: VllmClient, directory: Path, label: str) -> None:
    await client.pause("abort")
    await client.reload(directory)
    await client.reset_prefix_cache()
    await client.label(label)
    await client.resume()


def request(**changes):
    return {
        "request_id": "test", "token_ids": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": 7,
    } | changes  # fmt: skip


def completion(events: list[Event]) -> Completion:
    return Completion(
        tokens=[t for e in events for t in e.tokens],
        logps=[p for e in events for p in e.logps],
        sizes=[len(e.tokens) for e in events],
        finish=events[-1].finish_reason,
        spans=events[-1].weight_versions,
    )


async def complete(client: VllmClient, **changes) -> Completion:
    return completion([event async for event in client.generate(**request(**changes))])


class Streams:
    """Several completions in flight."""

    def __init__(self, client: VllmClient, n: int, **changes) -> None:
        self._events: list[list[Event]] = [[] for _ in range(n)]
        self._begun = asyncio.Event()
        self._client = client
        self._changes = changes
        self.tasks = [asyncio.create_task(self._stream(k)) for k in range(n)]

    async def _stream(self, k: int) -> Completion:
        async for event in self._client.generate(**request(request_id=f"s{k}", seed=k, **self._changes)):
            self._events[k].append(event)
            if all(self._events):
                self._begun.set()
        return completion(self._events[k])

    async def begun(self) -> None:
        """Every one of them has its first token."""
        async with asyncio.timeout(30):
            await self._begun.wait()

    async def ended(self) -> list[Completion]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*self.tasks)


def distance(a, b) -> float:
    return float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))))


async def test_events_are_the_first_token_then_sixteen_at_a_time(client):
    done = await complete(client)
    assert done.sizes == [1, INTERVAL, INTERVAL, INTERVAL, 11]
    assert done.finish == "length"
    assert done.spans == (WeightSpan(version="base", start=0, end=60),)


async def test_events_are_int32_and_float32(client):
    events = [event async for event in client.generate(**request(max_tokens=1))]
    assert [(e.tokens.typecode, e.logps.typecode, e.tokens.itemsize, e.logps.itemsize) for e in events] == [
        ("i", "f", 4, 4)
    ]


async def test_canary_equals_transformers(client, reference):
    for served, expected in zip(await client.canary(CANARY), reference["base"], strict=True):
        assert len(served) == len(expected)
        assert distance(served, expected) < FP32


async def test_canary_is_bit_equal_each_time_whatever_ran_in_between(client):
    first = await client.canary(CANARY)
    await Streams(client, 8).ended()
    assert await client.canary(CANARY) == first


async def test_canary_follows_the_weights_there_and_back(client, published, reference):
    before = await client.canary(CANARY)
    await load(client, published.moved, "moved")
    for served, expected, old in zip(await client.canary(CANARY), reference["moved"], before, strict=True):
        assert distance(served, expected) < FP32
        assert distance(served, old) > 0.01
    await load(client, published.base, "base")
    assert await client.canary(CANARY) == before


async def test_canary_is_not_answered_from_a_stale_prefix_cache(client, published, reference):
    long = CANARY[:1]  # over a block of 128 tokens
    await complete(client, token_ids=CANARY[0], max_tokens=1)
    await client.canary(long)
    await client.pause("keep")
    await client.reload(published.moved)
    await client.resume()
    assert distance((await client.canary(long))[0], reference["moved"][0]) < FP32


async def test_a_sampled_tokens_log_prob_is_the_canarys_of_the_same_sequence(client):
    done = await complete(client, max_tokens=100)
    (scored,) = await client.canary([[*PROMPT, *done.tokens]])
    assert distance(done.logps, scored[len(PROMPT) - 1 :]) < FP32


async def test_log_probs_are_after_temperature(client, tiny_model):
    done = await complete(client, temperature=0.6)
    policy = Llama(tiny_model)
    sequence = [*PROMPT, *done.tokens]
    logps = log_softmax(policy.forward(sequence[:-1], policy.cache(256)) / np.float32(0.6))
    expected = logps[np.arange(len(PROMPT) - 1, len(sequence) - 1), done.tokens]
    assert distance(done.logps, expected) < 2 * FP32


async def test_the_same_seed_gives_the_same_tokens_and_another_others(client):
    first, again, other = await complete(client), await complete(client), await complete(client, seed=8)
    assert again == first
    assert other.tokens != first.tokens


async def test_seeded_streams_do_not_depend_on_their_company(client):
    alone = await complete(client, seed=3)
    together = (await Streams(client, 12).ended())[3]
    assert together.tokens == alone.tokens
    assert distance(together.logps, alone.logps) < FP32


async def test_temperature_zero_takes_the_likeliest_token(client):
    done = await complete(client, temperature=0.0, seed=1)
    assert done.tokens == (await complete(client, temperature=0.0, seed=2)).tokens


async def test_a_stop_token_ends_the_completion_and_is_part_of_it(client):
    free = await complete(client)
    stop = free.tokens[20]
    done = await complete(client, stop_token_ids=[stop])
    assert done.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert done.finish == "stop"


async def test_more_streams_than_the_engine_holds_at_once_all_complete(client):
    done = await Streams(client, 80, max_tokens=20).ended()
    assert [len(d.tokens) for d in done] == [20] * 80
    assert len({tuple(d.tokens) for d in done}) == 80


async def test_abort_ends_every_stream_with_its_tokens_and_their_label(client):
    streams = Streams(client, 8, max_tokens=240)
    await streams.begun()
    await client.pause("abort")
    for done in await streams.ended():
        assert done.finish == "abort"
        assert 1 <= len(done.tokens) < 240
        assert done.spans == (WeightSpan(version="base", start=0, end=len(done.tokens)),)


async def test_an_aborted_stream_sent_again_goes_on_exactly_under_the_new_weights(client, published):
    streams = Streams(client, 4, max_tokens=200)
    await streams.begun()
    await client.pause("abort")
    parts = await streams.ended()
    await load(client, published.moved, "moved")
    for part in parts:
        so_far = [*PROMPT, *part.tokens]
        rest = await complete(client, token_ids=so_far, max_tokens=40)
        assert rest.spans == (WeightSpan(version="moved", start=0, end=len(rest.tokens)),)
        (scored,) = await client.canary([[*so_far, *rest.tokens]])
        assert distance(rest.logps, scored[len(so_far) - 1 :]) < FP32


async def test_an_abort_before_the_first_token_gives_none(client):
    await client.pause("abort")
    streams = Streams(client, 1)
    async with impatient(client) as other:
        with pytest.raises(DeadlineError):  # by then the request has arrived
            await other.canary([PROMPT])
    await client.pause("abort")
    (done,) = await streams.ended()
    assert (done.tokens, done.logps, done.finish) == ([], [], "abort")
    assert all(span.start == span.end for span in done.spans)


def impatient(client: VllmClient) -> VllmClient:
    deadlines = EngineDeadlines(first_token=0.5, event_gap=0.5, canary=0.5)
    return VllmClient(client.socket, log_path=client.log_path, deadlines=deadlines)


async def test_a_request_to_a_paused_engine_waits_and_its_deadline_names_it(client):
    await client.pause("abort")
    async with impatient(client) as other:
        with pytest.raises(DeadlineError, match=r"first token of request test within 0\.5 s"):
            await complete(other)
    await client.resume()
    assert len((await complete(client)).tokens) == 60


async def test_what_waited_at_a_paused_engine_starts_with_the_resume(client):
    await client.pause("abort")
    streams = Streams(client, 2)
    await client.label("later")
    await client.resume()
    assert [d.spans[0].version for d in await streams.ended()] == ["later", "later"]


async def test_keep_goes_on_over_the_old_keys_and_the_last_event_says_where_the_label_changed(client, published):
    streams = Streams(client, 4, max_tokens=200)
    await streams.begun()
    await client.pause("keep")
    await client.reload(published.moved)
    await client.label("moved")
    await client.resume()
    for done in await streams.ended():
        assert len(done.tokens) == 200
        first, second = done.spans
        assert (first.version, first.start, second.version, second.end) == ("base", 0, "moved", 200)
        assert first.end == second.start > 0
        (moved,) = await client.canary([[*PROMPT, *done.tokens]])
        after = slice(len(PROMPT) - 1 + second.start, None)
        assert distance(done.logps[second.start :], moved[after]) > 100 * FP32


async def test_the_label_is_the_last_one_set(client):
    await client.label("17")
    assert await client.served_label() == "17"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token_ids": [5] * 257}, "longer than the maximum model length of 256"),
        ({"token_ids": [5] * 256}, "longer than the maximum model length of 256"),
        ({"token_ids": [600]}, "Token id 600 is out of vocabulary"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
async def test_an_impossible_request_is_refused_by_name(client, changes, sentence):
    with pytest.raises(EngineRequestError, match=sentence):
        await complete(client, **changes)
    assert not EngineRequestError.retryable


async def test_a_completion_is_cut_at_the_models_length(client):
    done = await complete(client, token_ids=[5] * 250, max_tokens=50)
    assert (len(done.tokens), done.finish) == (6, "length")


async def test_a_reload_of_nothing_leaves_the_engine_as_it_is(client, tmp_path):
    before = await client.canary(CANARY)
    with pytest.raises(EngineError, match="no safetensors file to load in"):
        await client.reload(tmp_path)
    assert await client.canary(CANARY) == before


async def test_a_reload_of_a_torn_file_fails_and_a_good_one_mends_it(client, published, tmp_path):
    before = await client.canary(CANARY)
    whole = (published.base / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    shutil.copy(published.base / "config.json", tmp_path)
    await client.pause("abort")
    with pytest.raises(EngineError, match="refused /collective_rpc with 500"):
        await client.reload(tmp_path)
    await client.reload(published.base)
    await client.resume()
    assert await client.canary(CANARY) == before


async def test_a_reload_without_the_tied_head_shows_in_the_log_alone(client, published, reference):
    mark = client.log_mark()
    await load(client, published.moved, "moved")
    assert client.failed_weight_lines(mark) == []
    mark = client.log_mark()
    await load(client, published.headless, "headless")
    (line,) = client.failed_weight_lines(mark)
    assert "ParallelLMHead: Failed to load weights" in line


async def test_the_prefix_cache_is_not_reset_under_a_frozen_request(client):
    streams = Streams(client, 1, max_tokens=200)
    await streams.begun()
    await client.pause("keep")
    with pytest.raises(EngineError, match="pause with abort first"):
        await client.reset_prefix_cache()
    await client.resume()
    await streams.ended()
    await client.reset_prefix_cache()


async def test_leaving_a_stream_aborts_its_request(client):
    async with aclosing(client.generate(**request(max_tokens=240))) as events:
        await anext(events)
        await client.pause("keep")
    async with asyncio.timeout(10):
        while True:
            try:
                await client.reset_prefix_cache()
            except EngineError:
                continue
            break


async def test_health(client):
    await client.health()


async def test_a_sequence_too_short_for_a_canary_has_no_log_probs(client):
    assert await client.canary([[5]]) == [array("f")]
