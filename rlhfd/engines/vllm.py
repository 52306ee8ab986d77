"""Speak to a vLLM server over its unix socket: tokens in, tokens out, and the weights' life (vLLM 0.32).

The only module that knows vLLM's HTTP; `vllm_server.py` starts the process. The same calls are answered by
`rlhfd.testing.engine`, and one conformance suite holds both to what is relied upon here:

- A stream ends with exactly one event that has a finish reason; that event alone names the weight versions.
- `pause("abort")` ends every stream at once with its partial tokens; requests that arrive while paused wait silently.
- A canary is answered from the weights alone: never from the prefix cache, and bit for bit the same while the engine
  has nothing else to do.

Every wait has a deadline and names what it waited for. No connection is kept alive: an idle one breaks.
"""

import asyncio
import uuid
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias, TypeVar, cast

import aiohttp
import msgspec

from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, EngineRequestError

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
PauseMode: TypeAlias = Literal["abort", "keep"]

FAILED_WEIGHTS = "Failed to load weights"  # the only trace of a tensor that a reload did not set
WEIGHTLESS = "RotaryEmbedding"  # it has a table and no weights, and is reported at every reload
NO_LOGPROB = -9999.0  # vLLM's stand-in for NaN and -inf
NAME = "generator"
READ_BUFFER = 256 * 1024

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class EngineDeadlines:
    """Seconds. `first_token` includes the time that a request queues in the engine."""

    start: float = 600.0
    first_token: float = 120.0
    event_gap: float = 60.0
    pause: float = 60.0
    reload: float = 60.0
    canary: float = 30.0
    stop: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpan:
    """Tokens [start, end) of this request's output were sampled under the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What the server streams at a time: tokens int32 [n], logps float32 [n] (after temperature).

    The last event of a stream has the finish reason and, unless nothing was sampled, the weight versions.
    """

    tokens: "array[int]"
    logps: "array[float]"
    finish_reason: FinishReason | None = None
    weight_versions: tuple[WeightSpan, ...] = ()


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Error(msgspec.Struct, gc=False):
    message: str
    code: int = 500


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: _Error | None = None


class _Refusal(msgspec.Struct, gc=False):
    error: _Error | str | None = None


class _PromptLogprob(msgspec.Struct, gc=False):
    logprob: float


class _Scored(msgspec.Struct, gc=False):
    prompt_logprobs: list[dict[int, _PromptLogprob] | None]


class _Reset(msgspec.Struct, gc=False):
    success: bool


class _WeightInfo(msgspec.Struct, gc=False):
    weight_version: str


_chunk = msgspec.json.Decoder(_Chunk)
_scored = msgspec.json.Decoder(_Scored)
_refusal = msgspec.json.Decoder(_Refusal)
_reset = msgspec.json.Decoder(_Reset)
_weight_info = msgspec.json.Decoder(_WeightInfo)
_encode = msgspec.json.Encoder().encode


class VllmClient:
    """One engine. Close it, or use it as an async context manager. Bound to the loop of its first call."""

    def __init__(self, socket: Path, *, log_path: Path, deadlines: EngineDeadlines | None = None) -> None:
        self.socket = socket
        self.log_path = log_path
        self.deadlines = deadlines or EngineDeadlines()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every stream that is still open."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        *,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: Sequence[int] = (),
    ) -> AsyncGenerator[Event]:
        """Sample up to `max_tokens` tokens after `token_ids`; `stop_token_ids` alone end a completion ("stop").

        The last event comes once the connection is closed. Leave the loop early and the server aborts the request;
        wrap it in `contextlib.aclosing` to have that at once.

        Raises DeadlineError (first token, gap), EngineRequestError (refused as it stands), EngineDiedError (the
        connection broke), EngineError (anything else that the server or its answer got wrong).
        """
        body = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "stream": True,
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "logprobs": 0,
                "stop_token_ids": list(stop_token_ids),
                "ignore_eos": True,  # else the server adds end tokens of its own finding
                "detokenize": False,
            },
        }
        waiting_for, seconds = "first token", self.deadlines.first_token
        async with self._call("POST", "/inference/v1/generate", body, waiting_for, seconds) as response:
            buffer = b""
            last: Event | None = None
            while last is None:
                async with self._deadline(f"{waiting_for} of request {request_id}", seconds):
                    received = await response.content.readany()
                if not received:
                    raise EngineDiedError(f"the {NAME} ended request {request_id} without a finish reason")
                *lines, buffer = (buffer + received).split(b"\n\n")
                for line in lines:
                    event = _event(line, request_id)
                    if event.finish_reason is not None:
                        last = event
                        break
                    waiting_for, seconds = "next event", self.deadlines.event_gap
                    yield event
        yield last

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stop sampling. "abort" ends every stream with its tokens so far and forgets all keys and values.

        "keep" freezes the streams with theirs: they go on over keys of the old weights, and what they then sample has
        the log-probs of neither version.
        """
        clear = str(mode == "abort").lower()  # else even "keep" would throw the frozen streams' keys away
        await self._post(f"/pause?mode={mode}&clear_cache={clear}", None, f"pause ({mode})", self.deadlines.pause)

    async def resume(self) -> None:
        """Sample again; what arrived meanwhile starts now."""
        await self._post("/resume", None, "resume", self.deadlines.pause)

    async def reload(self, directory: Path) -> None:
        """Load the weights of a Hugging Face directory in place. Look at `failed_weight_lines` afterwards.

        Raises EngineError. After a reload that failed inside the engine nothing may be sampled before one that
        succeeds: the weights are gone, and the next request would kill it.
        """
        if not _has_weights(directory):
            raise EngineError(f"there is no safetensors file to load in {directory}; the {NAME} was left as it is")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._post("/collective_rpc", body, f"reload of {directory}", self.deadlines.reload)

    async def label(self, version: str) -> None:
        """Name the weights; `weight_versions` of what follows says so."""
        await self._post("/update_weight_version", {"new_version": version}, "version label", self.deadlines.pause)

    async def served_label(self) -> str:
        """The last label set, "default" before the first."""
        answer = await self._request("GET", "/weight_info", None, "version label", self.deadlines.pause)
        return _decoded(_weight_info, answer, "/weight_info").weight_version

    async def reset_prefix_cache(self) -> None:
        """Forget the keys of old weights. Raises EngineError while a request still holds blocks."""
        answer = await self._post("/reset_prefix_cache", None, "prefix cache reset", self.deadlines.pause)
        if not _decoded(_reset, answer, "/reset_prefix_cache").success:
            raise EngineError(
                f"the {NAME} kept its prefix cache because requests still hold it; pause with abort first"
            )

    async def health(self) -> None:
        """Raises where the server does not answer, or says that its engine is dead."""
        await self._request("GET", "/health", None, "health answer", self.deadlines.pause)

    async def canary(self, sequences: Sequence[Sequence[int]]) -> list["array[float]"]:
        """Log-probs at temperature 1 of every token after the first, float32 [len - 1] per sequence.

        One sequence after the other, past the prefix cache. Bit for bit repeatable only while no other request runs;
        hangs until the deadline while the engine is paused.
        """
        async with self._deadline("canary", self.deadlines.canary):
            return [await self._score(sequence) for sequence in sequences]

    async def _score(self, sequence: Sequence[int]) -> "array[float]":
        body = {
            "request_id": f"canary-{uuid.uuid4().hex}",
            "token_ids": list(sequence),
            "cache_salt": uuid.uuid4().hex,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False},
        }
        answer = await self._post("/inference/v1/generate", body, "canary", self.deadlines.canary)
        entries = _decoded(_scored, answer, "a canary").prompt_logprobs[1:]
        if len(entries) != len(sequence) - 1 or None in entries:
            raise EngineError(f"the {NAME} left out log-probs of a canary of {len(sequence)} tokens")
        try:
            logps = array("f", [e[t].logprob for e, t in zip(entries, sequence[1:], strict=True) if e is not None])
        except KeyError:
            raise EngineError(f"the {NAME} gave log-probs of other tokens than the canary's") from None
        return _finite(logps, "a canary")

    def log_mark(self) -> int:
        """Where the engine's log ends now, in bytes: a mark for `failed_weight_lines`."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def failed_weight_lines(self, since: int) -> list[str]:
        """Log lines after the mark that say a tensor was not loaded: the call itself answers 200."""
        with self.log_path.open("rb") as log:
            log.seek(since)
            lines = log.read().decode(errors="replace").splitlines()
        return [line for line in lines if FAILED_WEIGHTS in line and WEIGHTLESS not in line]

    # --- below: HTTP -----------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: object, waiting_for: str, seconds: float) -> bytes:
        return await self._request("POST", path, body, waiting_for, seconds)

    async def _request(self, method: str, path: str, body: object, waiting_for: str, seconds: float) -> bytes:
        async with self._deadline(waiting_for, seconds), self._call(method, path, body, waiting_for, seconds) as answer:
            return await answer.read()

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: object, waiting_for: str, seconds: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """An answer with status 200; anything else, and a broken connection, raises."""
        if self._session is None:
            connector = aiohttp.UnixConnector(path=str(self.socket), limit=0, force_close=True)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=READ_BUFFER
            )
        data, headers = (None, None) if body is None else (_encode(body), {"Content-Type": "application/json"})
        try:
            async with self._deadline(waiting_for, seconds):
                response = await self._session.request(method, f"http://engine{path}", data=data, headers=headers)
            async with response:
                if response.status != 200:
                    raise _refused(path, response.status, await response.read())
                yield response
        except aiohttp.ClientError as error:
            raise EngineDiedError(f"the {NAME} broke off {path.partition('?')[0]}: {error}") from error

    @asynccontextmanager
    async def _deadline(self, waiting_for: str, seconds: float) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise DeadlineError(f"the {NAME} did not give the {waiting_for} within {seconds:g} s") from None


def _event(line: bytes, request_id: str) -> Event:
    """One `data:` line of a stream."""
    try:
        chunk = _chunk.decode(line.removeprefix(b"data: "))
    except msgspec.DecodeError as error:
        raise EngineError(f"the {NAME} sent no event in request {request_id}: {error}") from error
    if chunk.error is not None:
        raise _fault(f"request {request_id}", chunk.error.code, chunk.error.message)
    if len(chunk.choices) != 1:
        raise EngineError(f"the {NAME} sent {len(chunk.choices)} choices in request {request_id}, not one")
    choice = chunk.choices[0]
    content = choice.logprobs.content if choice.logprobs is not None else None
    tokens = array("i", choice.token_ids or ())
    logps = array("f", [entry.logprob for entry in content or ()])
    if len(tokens) != len(logps):
        raise EngineError(f"the {NAME} sent {len(tokens)} tokens with {len(logps)} log-probs in request {request_id}")
    if choice.finish_reason not in {None, "stop", "length", "abort"}:
        raise EngineError(f"the {NAME} ended request {request_id} with the reason {choice.finish_reason!r}")
    return Event(
        tokens=tokens,
        logps=_finite(logps, f"request {request_id}"),
        finish_reason=cast("FinishReason | None", choice.finish_reason),
        weight_versions=tuple(
            WeightSpan(version=s.version, start=s.start, end=s.end) for s in choice.weight_versions or ()
        ),
    )


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _finite(logps: "array[float]", where: str) -> "array[float]":
    if logps and not min(logps) > NO_LOGPROB:
        raise EngineError(f"the {NAME} gave NaN or -inf as a log-prob in {where}; its weights may be damaged")
    return logps


def _decoded(decoder: "msgspec.json.Decoder[_T]", answer: bytes, where: str) -> _T:
    try:
        return decoder.decode(answer)
    except msgspec.DecodeError as error:
        raise EngineError(f"the {NAME} answered {where} with something else: {error}") from error


def _refused(path: str, status: int, body: bytes) -> EngineError:
    try:
        error = _refusal.decode(body).error
    except msgspec.DecodeError:
        error = None
    text = error.message if isinstance(error, _Error) else error or body[:200].decode(errors="replace")
    return _fault(path.partition("?")[0], status, text)


def _fault(where: str, status: int, text: str) -> EngineError:
    kind = EngineRequestError if 400 <= status < 500 else EngineError
    return kind(f"the {NAME} refused {where} with {status}: {text}")
