"""What the fake engine does between its requests and its policy: rounds, streams, pauses, faults.

consumes     requests, in order of arrival, at most `max_num_seqs` at once
produces     events in each request's queue: the first token, then `interval` tokens at a time, then a finish reason
waits for    work, while paused or idle
unblocked by `take`, `resume`
"""

import argparse
import asyncio
import itertools
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlhfd.testing.llama import Cache, Floats, Llama, log_softmax

FAULTS = frozenset(
    {
        "die_at_start",
        "die_after",
        "deaf",
        "hang_after",
        "error_after",
        "reload_fails",
        "ignore_reload",
        "stale_head",
    }
)
GREEDY = 1e-5


class RefusedError(Exception):
    """A request that the engine does not take; the message is vLLM's."""


@dataclass(kw_only=True, eq=False)
class Request:
    """One request in the engine. `out` carries events, None at the end; `sent` tokens of `tokens` are in it already."""

    id: str
    prompt: list[int]
    limit: int
    temperature: float
    rng: np.random.Generator
    stop: frozenset[int]
    interval: int
    wants_prompt_logprobs: bool
    cache: Cache | None = None
    tokens: list[int] = field(default_factory=list[int])
    logps: list[float] = field(default_factory=list[float])
    labels: list[str] = field(default_factory=list[str])
    prompt_logprobs: list[float] | None = None
    sent: int = 0
    out: "asyncio.Queue[dict[str, Any] | None]" = field(default_factory=asyncio.Queue["dict[str, Any] | None"])

    def emit(self, finish: str | None) -> None:
        """Send what has not been sent; with a finish reason, end the stream."""
        new = slice(self.sent, len(self.tokens))
        entries = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
            for t, p in zip(self.tokens[new], self.logps[new], strict=True)
        ]
        self.sent = len(self.tokens)
        choice = {
            "index": 0,
            "finish_reason": finish,
            "stop_reason": None,
            "token_ids": self.tokens[new],
            "weight_versions": self._spans() if finish is not None else None,
            "logprobs": {"content": entries},
        }
        self.out.put_nowait({"request_id": self.id, "usage": None, "output_mode": "tokens", "choices": [choice]})
        if finish is not None:
            self.out.put_nowait(None)

    def _spans(self) -> list[dict[str, Any]] | None:
        spans: list[dict[str, Any]] = []
        for label, run in itertools.groupby(self.labels):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": label, "start": start, "end": start + len(list(run))})
        return spans or None


class Engine:
    """Continuous batching, one token per request and round; everything else waits its turn in `_waiting`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._llama = Llama(Path(arguments.model))
        self.max_model_len: int = arguments.max_model_len
        self.interval: int = arguments.stream_interval
        self._max_num_seqs: int = arguments.max_num_seqs
        self._pace = 1.0 / arguments.tokens_per_second if arguments.tokens_per_second else 0.0
        self._rng = np.random.default_rng(arguments.seed)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._paused = False
        self._work = asyncio.Event()
        self._sampled = 0
        self._has_weights = True
        self.label = "default"
        self.faults = dict(parse_fault(text) for text in arguments.fault)

    def take(self, body: dict[str, Any]) -> Request:
        """Queue a request. Raises RefusedError."""
        sampling, prompt = body["sampling_params"], list(body["token_ids"])
        if any(token >= self._llama.vocabulary for token in prompt):
            raise RefusedError(f"Token id {max(prompt)} is out of vocabulary")
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise RefusedError(
                f"The decoder prompt (length {len(prompt)}) is longer than the maximum model length of "
                f"{self.max_model_len}."
            )
        seed = sampling.get("seed")
        request = Request(
            id=f"generate-tokens-{body.get('request_id')}",
            prompt=prompt,
            limit=min(room, sampling.get("max_tokens", room)),
            temperature=sampling.get("temperature", 1.0),
            rng=self._rng if seed is None else np.random.default_rng(seed),
            stop=frozenset(sampling.get("stop_token_ids") or ()),
            interval=max(self.interval, sampling.get("stream_interval") or 0),
            wants_prompt_logprobs=sampling.get("prompt_logprobs") is not None,
        )
        self._waiting.append(request)
        self._work.set()
        return request

    def drop(self, request: Request) -> None:
        """The client is gone."""
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)

    def pause(self, mode: str, *, clear_cache: bool) -> None:
        """abort: every request ends with what it has; keep: they stand still, with or without their keys."""
        self._paused = True
        if mode == "abort":
            for request in [*self._running, *self._waiting]:
                request.emit("abort")
            self._running, self._waiting = [], []
        elif clear_cache:
            for request in self._running:
                request.cache = None
            self._running, self._waiting = [], [*self._running, *self._waiting]

    def resume(self) -> None:
        """Sample again."""
        self._paused = False
        self._work.set()

    @property
    def paused(self) -> bool:
        """Whether nothing is sampled until `resume`."""
        return self._paused

    @property
    def holds_blocks(self) -> bool:
        """Whether a request stands between the cache and its reset."""
        return bool(self._running)

    def reload(self, directory: Path) -> None:
        """Replace the weights, with the trace in the log that the real engine leaves where the head is missing.

        Raises OSError, ValueError or KeyError; the next round is then the last.
        """
        if "ignore_reload" in self.faults:
            return
        self._has_weights = False
        if "reload_fails" in self.faults:
            raise OSError("the reload was made to fail")
        whole = self._llama.load(directory, skip_head="stale_head" in self.faults)
        self._warn("RotaryEmbedding")
        if not whole and "stale_head" not in self.faults:
            self._warn("ParallelLMHead")
        self._has_weights = True

    def _warn(self, layer: str) -> None:
        sys.stderr.write(f"WARNING {layer}: Failed to load weights\n")
        sys.stderr.flush()

    async def run(self) -> None:
        """Rounds, for ever."""
        while True:
            await self._work.wait()
            if self._paused or not (self._running or self._waiting) or self._fault_due("hang_after"):
                self._work.clear()
                continue
            self._round()
            await asyncio.sleep(self._pace)

    def _round(self) -> None:
        if not self._has_weights:
            raise RuntimeError("the last reload failed and left no weights to sample from")
        room = self._max_num_seqs - len(self._running)
        self._running += self._waiting[:room]
        del self._waiting[:room]
        for request in list(self._running):
            self._step(request)
            if self._fault_due("die_after"):
                os.kill(os.getpid(), signal.SIGKILL)

    def _step(self, request: Request) -> None:
        """One token more; without a cache, everything before it first."""
        if request.cache is None:
            request.cache = self._llama.cache(self.max_model_len)
            logits = self._llama.forward([*request.prompt, *request.tokens], request.cache)
            if request.wants_prompt_logprobs and not request.tokens:
                given = log_softmax(logits[:-1])[np.arange(len(request.prompt) - 1), request.prompt[1:]]
                request.prompt_logprobs = [float(p) for p in given]
        else:
            logits = self._llama.forward(request.tokens[-1:], request.cache)
        token, logp = _sample(logits[-1], request.temperature, request.rng)
        request.tokens.append(token)
        request.logps.append(logp)
        request.labels.append(self.label)
        self._sampled += 1
        self._stream(request, token)

    def _stream(self, request: Request, token: int) -> None:
        if self._fault_due("error_after"):
            del self.faults["error_after"]
            self._running.remove(request)
            request.out.put_nowait(error_event("the engine was made to fail", 500))
            request.out.put_nowait(None)
        elif token in request.stop or len(request.tokens) >= request.limit:
            self._running.remove(request)
            request.emit("stop" if token in request.stop else "length")
        elif len(request.tokens) == 1 or len(request.tokens) - request.sent >= request.interval:
            request.emit(None)

    def _fault_due(self, name: str) -> bool:
        return name in self.faults and self._sampled >= self.faults[name]

    def set_fault(self, name: str, value: int) -> None:
        """N counts from now."""
        self.faults[name] = self._sampled + value


def _sample(logits: Floats, temperature: float, rng: np.random.Generator) -> tuple[int, float]:
    """Gumbel-max; the log-prob is after temperature."""
    greedy = temperature < GREEDY
    logps = log_softmax(logits if greedy else logits / np.float32(temperature))
    token = int(np.argmax(logps if greedy else logps + rng.gumbel(size=len(logps))))
    return token, float(logps[token])


def parse_fault(text: str) -> tuple[str, int]:
    """`name` or `name=N`. Raises ValueError for a fault that does not exist."""
    name, _, value = text.partition("=")
    if name not in FAULTS:
        raise ValueError(f"{name} is no fault; there are {', '.join(sorted(FAULTS))}")
    return name, int(value or 0)


def error_event(message: str, code: int) -> dict[str, Any]:
    """As vLLM words an error, in a body or in a stream."""
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}
