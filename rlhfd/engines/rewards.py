"""The daemon's side of the rewards: a pool of worker processes that user code can't take down.

    score(frame) ─► a free worker, one call at a time, within the reward's timeout ─► Scored
    each slot's keeper: start ─► ready ─► lost (hung, died, cancelled in mid-call) ─► kill, back off, start again

A reward that raises or returns nonsense is an answer (`Scored.error_kind`), and so is one that hung or ended its
process, after `retries` further tries. Errors are raised only where the pool itself can't go on.
"""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from rlhfd.core.wire import Decode, Decoded, RewardReady, RewardSetup, RewardsRefused, Score, Scored
from rlhfd.engines.channel import Channel
from rlhfd.engines.process import Child, describe_exit
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, EngineStartError, JobFileError, RlhfdError

START_LIMIT = 120.0  # seconds to start a worker and import what its rewards need
DECODE_LIMIT = 60.0
EXIT_LIMIT = 2.0  # from the end of a channel to the exit status of its process
LONGEST_PAUSE = 60.0
MOST_FAILED_STARTS = 5  # in a row, over all slots

Spawn: TypeAlias = Callable[[int], Awaitable[Child]]
Pause: TypeAlias = Callable[[float], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class _Worker:
    """A ready process. `proven`: it has answered a call; `lost`: it must not be used any more."""

    child: Child
    channel: Channel
    proven: bool = False
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    async def last_words(self, problem: EngineDiedError) -> str:
        """What became of the process, once its channel is of no more use."""
        try:
            async with asyncio.timeout(EXIT_LIMIT):
                return f"ended its process ({describe_exit(await self.child.wait())})"
        except TimeoutError:
            return f"broke the channel of its worker ({problem})"

    async def until_lost(self) -> None:
        """Wait until a call found it unusable, or its process ended by itself."""
        ends = [asyncio.ensure_future(self.lost.wait()), asyncio.ensure_future(self.child.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            self.lost.set()


class RewardPool:
    """`size` workers for one job's rewards. `names`: the rewards' display names, once started.

    `spawn(slot)` starts a child with a channel; `timeouts`: seconds a reward may take, in the job's order, its
    worker's start not counted; `retries`: further tries after a timeout or a death; `work_dir`: holds each worker's
    private directory and is emptied; `pause` waits between starts.
    """

    def __init__(
        self,
        *,
        spawn: Spawn,
        setup: RewardSetup,
        timeouts: Sequence[float],
        size: int,
        work_dir: Path,
        retries: int = 1,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self.names: list[str] = []
        self._spawn = spawn
        self._setup = setup
        self._timeouts = list(timeouts)
        self._size = size
        self._work_dir = work_dir
        self._retries = retries
        self._pause = pause
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None: the pool has ended, see _end
        self._closed = False
        self._end = EngineError("the reward pool is closed")
        self._asked = 0
        self._failed_starts = 0
        self._keepers: list[asyncio.Task[None]] = []
        self._children: set[Child] = set()

    async def start(self) -> None:
        """Start the workers; returns when the first is ready.

        Raises JobFileError where the rewards can't be used as they are written (the file does not import, or ends or
        hangs the process while it does), EngineStartError where the worker itself did not start.
        """
        first = await self._start_worker(0)
        self._keepers = [
            asyncio.create_task(self._keep(slot, None if slot else first), name=f"reward worker {slot}")
            for slot in range(self._size)
        ]

    async def close(self) -> None:
        """Kill all workers. Calls that are out or wait for one raise EngineError."""
        self._stop(self._end)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(self._end_child(child) for child in set(self._children)))
        await asyncio.to_thread(shutil.rmtree, self._work_dir, ignore_errors=True)

    async def score(self, frame: Score) -> Scored:
        """One reward of one rollout: a finite value, or `error_kind` and a sentence.

        A timeout or the worker's death is tried again, an exception or a bad value never. Raises EngineError where
        no worker can be had any more.
        """
        scored = await self._score_once(frame)
        for _ in range(self._retries):
            if scored.error_kind not in {"timeout", "died"}:
                break
            scored = await self._score_once(frame)
        return scored

    async def decode(self, tokens: Sequence[bytes]) -> list[str]:
        """Texts of token ids (int32), special tokens left out. Raises EngineError, DeadlineError."""
        async with self._lend() as worker:
            reply = await worker.channel.call(Decode(tokens=list(tokens)), deadline=DECODE_LIMIT, what="decoded texts")
        if not isinstance(reply, Decoded):
            raise EngineDiedError(f"a reward worker answered Decode with {type(reply).__name__}")
        return reply.texts

    async def _score_once(self, frame: Score) -> Scored:
        limit, name = self._timeouts[frame.reward], self.names[frame.reward]
        async with self._lend() as worker:
            try:
                what = f"reward {name} of rollout {frame.rollout_id}"
                reply = await worker.channel.call(frame, deadline=limit, what=what)
            except DeadlineError:
                return _failed(frame, "timeout", f"reward {name} gave no value within {limit:g} s")
            except EngineDiedError as problem:
                error = f"reward {name} {await worker.last_words(problem)}"
                if self._closed:
                    raise self._end from problem  # it was us
                return _failed(frame, "died", error)
            if isinstance(reply, Scored) and (reply.rollout_id, reply.reward) == (frame.rollout_id, frame.reward):
                worker.proven = True
                return reply
            worker.lost.set()  # out of step: its next answer would be taken for another's
            return _failed(frame, "died", f"reward {name} wrote to the channel of its worker")

    @asynccontextmanager
    async def _lend(self) -> AsyncGenerator[_Worker]:
        """A free worker; given back unless its call was given up, for then the late answer would be the next one."""
        worker = await self._next_free()
        try:
            yield worker
        finally:
            if worker.channel.broken:
                worker.lost.set()
            if not worker.lost.is_set():
                self._free.put_nowait(worker)

    async def _next_free(self) -> _Worker:
        """Raises EngineError if the pool has ended, DeadlineError naming the queue if it does not move."""
        longest_turn = max([*self._timeouts, DECODE_LIMIT]) + START_LIMIT + LONGEST_PAUSE
        limit = longest_turn * (1 + self._asked // self._size)
        self._asked += 1
        try:
            async with asyncio.timeout(limit):
                while (worker := await self._free.get()) is not None:
                    if not worker.lost.is_set() and worker.child.status is None:
                        return worker
        except TimeoutError:
            raise DeadlineError(f"no reward worker was free within {limit:g} s") from None
        finally:
            self._asked -= 1
        self._free.put_nowait(None)  # for the next one who waits
        raise self._end

    async def _keep(self, slot: int, worker: _Worker | None) -> None:
        """One slot's life: consumes lost workers, produces ready ones, until cancelled or too many did not start."""
        failures = 0
        while not self._closed:
            try:
                worker = worker or await self._start_worker(slot)
            except (RlhfdError, OSError) as problem:
                failures += 1
                self._note_failed_start(problem)
            else:
                self._failed_starts = 0
                await self._serve(worker)
                failures = 0 if worker.proven else failures + 1
                worker = None
            if failures and not self._closed:
                await self._pause(min(2.0 ** (failures - 1), LONGEST_PAUSE))

    def _note_failed_start(self, problem: Exception) -> None:
        self._failed_starts += 1
        if self._failed_starts >= MOST_FAILED_STARTS:
            self._stop(EngineStartError(f"reward workers do not start any more: {problem}"))

    async def _serve(self, worker: _Worker) -> None:
        """Hand a worker to the callers until it is lost, then end its processes."""
        self._free.put_nowait(worker)
        try:
            await worker.until_lost()
        finally:
            await self._end_child(worker.child)

    async def _end_child(self, child: Child) -> None:
        await child.kill()  # first: a call that still waits then reads the end of the channel
        if child.channel_socket is not None:
            child.channel_socket.close()
        self._children.discard(child)

    def _stop(self, reason: EngineError) -> None:
        self._closed = True
        self._end = reason
        self._free.put_nowait(None)

    async def _start_worker(self, slot: int) -> _Worker:
        directory = self._work_dir / str(slot)
        await asyncio.to_thread(_make_empty, directory)
        child = await self._spawn_whole(slot)
        self._children.add(child)
        ready = False
        try:
            worker = await self._set_up(child, directory)
            ready = True
        finally:
            if not ready:
                await self._end_child(child)
        return worker

    async def _spawn_whole(self, slot: int) -> Child:
        """A child; where the caller is cancelled meanwhile, none: half a start would leave a process behind."""
        starting = asyncio.ensure_future(self._spawn(slot))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await self._end_child(await starting)
            raise

    async def _set_up(self, child: Child, directory: Path) -> _Worker:
        worker = _Worker(child=child, channel=await Channel.open(child))
        setup = msgspec.structs.replace(self._setup, work_dir=str(directory))
        try:
            reply = await worker.channel.call(setup, deadline=START_LIMIT, what="the rewards to be imported")
        except DeadlineError as problem:
            raise JobFileError(f"the reward files did not import within {START_LIMIT:g} s") from problem
        except EngineDiedError as problem:
            last_words = await worker.last_words(problem)
            raise JobFileError(f"a reward file, while it was imported, {last_words}") from problem
        if isinstance(reply, RewardsRefused):
            raise JobFileError(reply.message)
        if not isinstance(reply, RewardReady):
            raise EngineStartError(f"a reward worker answered RewardSetup with {type(reply).__name__}")
        self.names = reply.names
        return worker


def _failed(frame: Score, kind: Literal["timeout", "died"], error: str) -> Scored:
    return Scored(rollout_id=frame.rollout_id, reward=frame.reward, value=None, error_kind=kind, error=error)


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
