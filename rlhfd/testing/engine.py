"""A generator without vLLM: the same HTTP, the true policy of a small Llama, faults on demand.

`python -m rlhfd.testing.engine --model DIR --uds PATH [vLLM's other flags] [--tokens-per-second R] [--fault NAME[=N]]`

It starts in under a second and passes the conformance suite of the real server. Its own flags may come through a
job's `engine_args` (`tokens_per_second`, `fault`); a fault may also be set while it runs, by
`POST /fault {"name": NAME, "value": N}`. Faults, N counting sampled tokens:

    die_at_start          prints a line and exits with status 1      die_after=N     SIGKILLs itself
    deaf                  ignores SIGTERM                            hang_after=N    samples nothing any more
    reload_fails          answers a reload with 500                  error_after=N   ends one stream with an error event
    ignore_reload         answers 200 and loads nothing              stale_head      loads everything but lm_head
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rlhfd.testing.rounds import Engine, RefusedError, Request, error_event, parse_fault


class Server:
    """vLLM's paths over an `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def application(self) -> web.Application:
        """Every path that rlhfd uses, and `/fault`."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_get("/health", self._health)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/is_paused", self._is_paused)
        for path, handler in {
            "/inference/v1/generate": self._generate,
            "/pause": self._pause,
            "/resume": self._resume,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._label,
            "/reset_prefix_cache": self._reset,
            "/fault": self._fault,
        }.items():
            app.router.add_post(path, handler)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._engine.label})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._engine.paused})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in {"abort", "keep"}:
            return web.json_response(error_event("Input should be 'abort', 'wait' or 'keep'", 400), status=400)
        self._engine.pause(mode, clear_cache=request.query.get("clear_cache", "true") == "true")
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._engine.resume()
        return web.json_response({"status": "resumed"})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("method") != "reload_weights":
            return web.json_response(error_event(f"no method {body.get('method')}", 500), status=500)
        try:
            self._engine.reload(Path(body["kwargs"]["weights_path"]))
        except (OSError, ValueError, KeyError) as error:
            return web.json_response(error_event(f"Call to collective_rpc method failed: {error}", 500), status=500)
        return web.json_response({"results": [None]})

    async def _label(self, request: web.Request) -> web.Response:
        self._engine.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self._engine.label})

    async def _reset(self, _: web.Request) -> web.Response:
        return web.json_response({"success": not self._engine.holds_blocks})

    async def _fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, value = parse_fault(f"{body['name']}={body.get('value', 0)}")
        self._engine.set_fault(name, value)
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["sampling_params"].get("max_tokens", 1) < 1:
            return web.json_response(error_event("max_tokens must be at least 1, got 0.", 400), status=400)
        if body.get("stream"):
            return await self._answer_in_events(request, body)
        return await self._answer_at_once(body)

    async def _answer_at_once(self, body: dict[str, Any]) -> web.Response:
        try:
            taken = self._engine.take(body)
        except RefusedError as error:
            return web.json_response(error_event(str(error), 400), status=400)
        async for _ in _events(taken):
            pass
        given = zip(taken.prompt[1:], taken.prompt_logprobs or (), strict=False)
        entries = [{str(token): {"logprob": logp, "rank": 1}} for token, logp in given]
        choice = {"index": 0, "finish_reason": "length", "token_ids": taken.tokens}
        return web.json_response(
            {
                "request_id": taken.id,
                "choices": [choice],
                "prompt_logprobs": [None, *entries] if taken.wants_prompt_logprobs else None,
            }
        )

    async def _answer_in_events(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            taken = self._engine.take(body)
        except RefusedError as error:
            await answer.write(_line(error_event(str(error), 400)))
        else:
            try:
                async for event in _events(taken):
                    await answer.write(_line(event))
            finally:
                self._engine.drop(taken)
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def _events(request: Request) -> AsyncIterator[dict[str, Any]]:
    while (event := await request.out.get()) is not None:
        yield event


def _line(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def arguments(argv: list[str]) -> argparse.Namespace:
    """The flags of vLLM that matter here, and our own; its others are taken and ignored."""
    parser = argparse.ArgumentParser(prog="rlhfd.testing.engine", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-second", type=float, default=0.0, help="of each stream; 0: as fast as it can")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=N]")
    return parser.parse_known_args(argv)[0]


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM."""
    engine = Engine(options)
    if "die_at_start" in engine.faults:
        sys.exit("the engine was made to die at its start")
    stop = asyncio.Event()
    _on_sigterm((lambda: None) if "deaf" in engine.faults else stop.set)
    runner = web.AppRunner(Server(engine).application(), access_log=None, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.UnixSite(runner, options.uds).start()
    rounds = asyncio.create_task(engine.run())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({rounds, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if rounds.done():
        rounds.result()


def _on_sigterm(action: Callable[[], None]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, action)


if __name__ == "__main__":
    asyncio.run(serve(arguments(sys.argv[1:])))
