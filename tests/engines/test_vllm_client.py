"""The client against a server that breaks its promises: each fault has its own error, and none passes silently."""

import asyncio
import json
from contextlib import aclosing, asynccontextmanager, suppress

import pytest
from aiohttp import web

from rlhfd.engines.vllm import EngineDeadlines, VllmClient
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, EngineRequestError

SOON = EngineDeadlines(first_token=0.2, event_gap=0.1, pause=0.2, reload=0.2, canary=0.2)
BREAK = object()
HANG = object()


def event(tokens=(5,), logps=(-1.0,), finish=None, **more) -> dict:
    content = None if logps is None else {"content": [{"token_id": 0, "logprob": p} for p in logps]}
    return {"choices": [{"index": 0, "token_ids": tokens, "logprobs": content, "finish_reason": finish, **more}]}


@asynccontextmanager
async def engine(tmp_path, *answers, status=200, path="/inference/v1/generate", deadlines=SOON):
    """A client of a server that answers `path` with these: dicts as events, bytes as they are, BREAK, HANG."""
    gone = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        try:
            for answer in answers:
                if answer is BREAK:
                    request.transport.abort()
                elif answer is HANG:
                    await asyncio.Event().wait()
                else:
                    data = answer if isinstance(answer, bytes) else b"data: " + json.dumps(answer).encode() + b"\n\n"
                    await response.write(data)
        finally:
            gone.set()
        return response

    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "e.sock")).start()
    async with VllmClient(tmp_path / "e.sock", log_path=tmp_path / "log", deadlines=deadlines) as client:
        client.gone = gone
        yield client
    await runner.cleanup()


def stream(client: VllmClient):
    return client.generate(request_id="r", token_ids=[1, 2], max_tokens=9, temperature=1.0, seed=0)


async def collect(client: VllmClient) -> list:
    return [e async for e in stream(client)]


DONE = b"data: [DONE]\n\n"
LAST = event((), (), "length", weight_versions=[{"version": "3", "start": 0, "end": 1}])


async def test_events_are_put_together_however_the_bytes_are_cut(tmp_path):
    whole = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in (event(), event((6, 7), (-2.0, -3.0)), LAST))
    cut = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    async with engine(tmp_path, *cut, DONE) as client:
        events = await collect(client)
    assert [list(e.tokens) for e in events] == [[5], [6, 7], []]
    assert [list(e.logps) for e in events] == [[-1.0], [-2.0, -3.0], []]
    assert events[-1].finish_reason == "length"
    assert events[-1].weight_versions[0].version == "3"


@pytest.mark.parametrize("nothing", [{"token_ids": None, "logprobs": None}, {"token_ids": [], "logprobs": None}])
async def test_an_abort_before_the_first_token_may_be_null_or_empty(tmp_path, nothing):
    choice = {"index": 0, "finish_reason": "abort", "weight_versions": None} | nothing
    async with engine(tmp_path, {"choices": [choice]}, DONE) as client:
        (only,) = await collect(client)
    assert (len(only.tokens), len(only.logps), only.finish_reason, only.weight_versions) == (0, 0, "abort", ())


@pytest.mark.parametrize(
    ("answers", "error", "sentence"),
    [
        (
            [{"error": {"message": "too long", "code": 400}}, DONE],
            EngineRequestError,
            "refused request r with 400: too",
        ),
        (
            [event(), {"error": {"message": "no memory", "code": 500}}],
            EngineError,
            "refused request r with 500: no mem",
        ),
        ([event()], EngineDiedError, "ended request r without a finish reason"),
        ([], EngineDiedError, "ended request r without a finish reason"),
        ([event(), BREAK], EngineDiedError, "broke off /inference/v1/generate"),
        ([event(), DONE], EngineError, "sent no event in request r"),
        ([b"data: {torn\n\n"], EngineError, "sent no event in request r"),
        ([{"choices": [{"token_ids": "five"}]}], EngineError, "sent no event in request r"),
        ([event(logps=None)], EngineError, "sent 1 tokens with 0 log-probs in request r"),
        ([event((5, 6), (-1.0,))], EngineError, "sent 2 tokens with 1 log-probs in request r"),
        ([event(logps=(-9999.0,))], EngineError, "gave NaN or -inf as a log-prob in request r"),
        ([event(finish="repetition")], EngineError, "ended request r with the reason 'repetition'"),
        ([{"choices": []}], EngineError, "sent 0 choices in request r, not one"),
        ([HANG], DeadlineError, r"did not give the first token of request r within 0\.2 s"),
        ([event(), HANG], DeadlineError, r"did not give the next event of request r within 0\.1 s"),
    ],
)
async def test_a_faulty_stream_is_an_error_that_says_what_was_wrong(tmp_path, answers, error, sentence):
    async with engine(tmp_path, *answers) as client:
        with pytest.raises(error, match=sentence) as caught:
            await collect(client)
    assert type(caught.value) is error


async def test_tokens_before_a_fault_are_not_lost(tmp_path):
    seen = []

    async def read(client: VllmClient) -> None:
        async for e in stream(client):
            seen.extend(e.tokens)

    async with engine(tmp_path, event(), BREAK) as client:
        with pytest.raises(EngineDiedError):
            await read(client)
    assert seen == [5]


async def test_leaving_a_stream_closes_its_connection(tmp_path):
    async with engine(tmp_path, event(), HANG) as client:
        async with aclosing(stream(client)) as events:
            await anext(events)
        async with asyncio.timeout(5):
            await client.gone.wait()


async def test_cancelling_a_stream_closes_its_connection(tmp_path):
    patient = EngineDeadlines()
    async with engine(tmp_path, event(), HANG, deadlines=patient) as client:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in stream(client):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            await client.gone.wait()


async def test_a_slow_reader_is_not_mistaken_for_a_slow_engine(tmp_path):
    async with engine(tmp_path, event(), LAST, DONE) as client:
        events = stream(client)
        await anext(events)
        with suppress(TimeoutError):
            async with asyncio.timeout(3 * SOON.event_gap):
                await asyncio.Event().wait()
        assert (await anext(events)).finish_reason == "length"
        await events.aclose()


@pytest.mark.parametrize(
    ("status", "body", "error", "sentence"),
    [
        (
            400,
            b'{"error": {"message": "bad mode", "code": 400}}',
            EngineRequestError,
            "refused /pause with 400: bad mode",
        ),
        (500, b'{"error": "Failed to pause"}', EngineError, "refused /pause with 500: Failed to pause"),
        (503, b"<html>", EngineError, "refused /pause with 503: <html>"),
        (404, b"", EngineRequestError, "refused /pause with 404"),
    ],
)
async def test_a_refusal_carries_the_servers_own_words(tmp_path, status, body, error, sentence):
    async with engine(tmp_path, body, status=status, path="/pause") as client:
        with pytest.raises(error, match=sentence):
            await client.pause("abort")


async def test_a_pause_that_never_comes_back_is_named(tmp_path):
    async with engine(tmp_path, HANG, path="/pause") as client:
        with pytest.raises(DeadlineError, match=r"did not give the pause \(keep\) within 0\.2 s"):
            await client.pause("keep")


async def test_no_engine_at_all_is_a_dead_engine(tmp_path):
    async with VllmClient(tmp_path / "none.sock", log_path=tmp_path / "log") as client:
        with pytest.raises(EngineDiedError, match="broke off /health"):
            await client.health()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b'{"prompt_logprobs": null}', "answered a canary with something else"),
        (b"torn", "answered a canary with something else"),
        (b'{"prompt_logprobs": [null, null]}', "left out log-probs of a canary of 2 tokens"),
        (b'{"prompt_logprobs": [null, {"7": {"logprob": -9999.0}}]}', "gave NaN or -inf as a log-prob in a canary"),
    ],
)
async def test_a_canary_without_its_log_probs_is_an_error(tmp_path, answer, sentence):
    async with engine(tmp_path, answer) as client:
        with pytest.raises(EngineError, match=sentence):
            await client.canary([[5, 7]])


async def test_a_canary_of_other_tokens_or_lengths_is_an_error(tmp_path):
    async with engine(tmp_path, b'{"prompt_logprobs": [null, {"8": {"logprob": -1.0}}]}') as client:
        with pytest.raises(EngineError, match="other tokens than the canary's"):
            await client.canary([[5, 7]])
        with pytest.raises(EngineError, match="left out log-probs"):
            await client.canary([[5, 8, 9]])


async def test_failed_weight_lines_are_those_after_the_mark_and_not_of_layers_without_weights(tmp_path):
    client = VllmClient(tmp_path / "e.sock", log_path=tmp_path / "log")
    assert client.log_mark() == 0
    (tmp_path / "log").write_text("ParallelLMHead: Failed to load weights\n")
    mark = client.log_mark()
    with (tmp_path / "log").open("a") as log:
        log.write("RotaryEmbedding: Failed to load weights\nall well\nQKVParallelLinear: Failed to load weights\n")
    assert client.failed_weight_lines(mark) == ["QKVParallelLinear: Failed to load weights"]
