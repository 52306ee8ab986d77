"""Rollouts out of the engine: one coroutine a rollout, one COMMIT a row.

consumes     Generate actions
produces     rows of `ROW` tokens under one version (invariants 1 and 2), finished rollouts
waits for    the engine's events: first token, then the gap between two (deadlines in the client)
unblocked by publication: pause(abort) ends every stream at once with its tokens so far

The gate: while it is closed no request is sent, because one that arrives at a paused engine waits silently.
"""

import asyncio
from array import array
from contextlib import aclosing
from dataclasses import dataclass, field

from rlhfd.core import crash
from rlhfd.core.order import request_seed
from rlhfd.core.plan import Generate
from rlhfd.core.types import Group, Rollout, Version
from rlhfd.engines.vllm import VllmClient, WeightSpan
from rlhfd.errors import DeadlineError, EngineError, WeightSyncError
from rlhfd.pipeline.context import Context
from rlhfd.store import chunks, rollouts

ROW = 64  # tokens of a stored row: packs best into 4 KiB pages


@dataclass(kw_only=True, slots=True)
class Stream:
    """A rollout in flight: committed (`length`), not yet committed (the buffers); `gained`: a row came, or it ended."""

    rollout: Rollout
    length: int
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logps: "array[float]" = field(default_factory=lambda: array("f"))
    gained: asyncio.Event = field(default_factory=asyncio.Event)


class Generator:
    """The engine's side of the pipeline: gate, streams in flight, rows."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.client: VllmClient | None = None
        self.version: Version | None = None  # what the engine runs, once it has been checked
        self.open = False
        self._streams: dict[int, Stream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def out_of_service(self) -> None:
        """The engine is gone; what it had is committed by each stream's own end."""
        self.client, self.version, self.open = None, None, False

    @property
    def in_flight(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    async def generate(self, action: Generate) -> None:
        """One rollout, from where it stands until it finishes or the stream ends; every token received is committed."""
        client, version, context = self.client, self.version, self._context
        if not self.open or client is None or version is None:
            return
        rollout, group = action.rollout, action.group
        stream = Stream(rollout=rollout, length=rollout.n_tokens)
        self._streams[rollout.id] = stream
        self._empty.clear()
        try:
            await rollouts.start_rollout(context.db, rollout.id, context.epoch)
            finish = await self._stream(client, version, stream, group)
            await self._end(stream, version, finish)
        except (EngineError, DeadlineError):
            await self._end(stream, version, None)
            raise
        finally:
            del self._streams[rollout.id]
            stream.gained.set()
            if not self._streams:
                self._empty.set()

    async def _stream(self, client: VllmClient, version: Version, stream: Stream, group: Group) -> str | None:
        """Rows while the engine writes; the finish reason ("stop", "length"), or None where it was aborted."""
        context, rollout = self._context, stream.rollout
        prompt = context.snapshot.row(group.row)
        so_far = await chunks.tokens(context.db, rollout.id)
        limit = context.config.rollout.max_completion_length
        if stream.length >= limit:
            return "length"
        if not self.open:  # the gate closed while the rows were read
            return None
        events = client.generate(
            request_id=f"{rollout.id}-{stream.length}-{context.epoch}",
            token_ids=[*prompt.tokens, *array("i", so_far)],
            max_tokens=limit - stream.length,
            temperature=context.config.rollout.temperature,
            seed=request_seed(context.config.job.seed, group.ordinal, rollout.k, stream.length),
            stop_token_ids=sorted(context.eos_token_ids),
        )
        async with aclosing(events):
            async for event in events:
                stream.tokens.extend(event.tokens)
                stream.logps.extend(event.logps)
                if event.finish_reason is not None:
                    self._check_labels(event.weight_versions, version)
                    return None if event.finish_reason == "abort" else event.finish_reason
                while len(stream.tokens) >= ROW:
                    await self._row(stream, version, ROW)
        raise EngineError(f"the generator ended the stream of rollout {rollout.id} without a finish reason")

    def _check_labels(self, spans: tuple[WeightSpan, ...], version: Version) -> None:
        """The engine's own label of the weights must be ours (invariant 5)."""
        for span in spans:
            if span.version != str(version.id):
                raise WeightSyncError(
                    f"the generator sampled under version label {span.version} where {version.id} was loaded"
                )

    async def _row(self, stream: Stream, version: Version, n: int, finish: str | None = None) -> None:
        """Commit the first n buffered tokens; with `finish`, and the rollout's end, in the same transaction."""
        await chunks.append_chunk(
            self._context.db,
            stream.rollout.id,
            stream.length,
            stream.tokens[:n].tobytes(),
            stream.logps[:n].tobytes(),
            version.id,
            finish=finish,
        )
        crash.here("generate.row")
        del stream.tokens[:n], stream.logps[:n]
        stream.length += n
        stream.gained.set()

    async def _end(self, stream: Stream, version: Version, finish: str | None) -> None:
        """Commit what is left; a stream cut short becomes a partial rollout, unless its last token ended it."""
        context, n = self._context, len(stream.tokens)
        if finish is None and n and stream.tokens[-1] in context.eos_token_ids:
            finish = "stop"
        if finish is None and stream.length + n >= context.config.rollout.max_completion_length:
            finish = "length"
        if n or finish is not None:
            await self._row(stream, version, n, finish)
        if finish is None:
            await rollouts.release_rollout(context.db, stream.rollout.id)

    async def close_gate(self, patience: float) -> bool:
        """Let no new request through, once every stream now in flight has gained a row.

        Without that wait publications could eat all progress by re-prefilling. False where `patience` (seconds) ran
        out first: the gate is closed all the same.
        """
        waiting = [s.gained.wait() for s in self._streams.values()]
        try:
            async with asyncio.timeout(patience):
                await asyncio.gather(*waiting)
        except TimeoutError:
            return False
        finally:
            self.open = False
        return True

    async def drained(self, deadline: float) -> None:
        """Until every stream has ended and committed. Raises DeadlineError."""
        try:
            async with asyncio.timeout(deadline):
                await self._empty.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{len(self._streams)} streams did not end within {deadline:.0f} s of the generator's pause"
            ) from None
