"""Keeps one child process alive: bring it up, wait for its end, bring it up again with a growing pause.

consumes     the end of a child, or the word that it is suspect (a stream broke, a deadline ran out)
produces     a live child; after `LIMIT` losses without an applied step between them, the error that fails the job
waits for    the child's exit
unblocked by `suspect`, cancellation
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rlhfd.engines.process import Child, describe_exit
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, RlhfdError
from rlhfd.pipeline.context import Context

LIMIT = 5
LONGEST_PAUSE = 60.0  # seconds
GRACE = 5.0  # seconds from SIGTERM to SIGKILL
LAST_WORDS = 2.0  # seconds in which the end of a child that broke off is noticed
LOG_LINES = 15


class Keeper:
    """One role of one attempt. `spawn` starts the child, `bring_up` puts it into service, `on_loss` takes it out."""

    def __init__(
        self,
        context: Context,
        role: str,
        spawn: Callable[[], Awaitable[Child]],
        bring_up: Callable[[Child], Coroutine[Any, Any, None]],
        on_loss: Callable[[], None],
    ) -> None:
        self._context = context
        self._role = role
        self._spawn = spawn
        self._bring_up = bring_up
        self._on_loss = on_loss
        self._why: RlhfdError | None = None
        self._suspected = asyncio.Event()
        self.losses = 0
        self.life = 0  # of the child: how many there have been

    async def run(self) -> None:
        """Until cancelled. Raises the last error after `LIMIT` losses in a row, with the log's last lines."""
        while True:
            lost = await self._live_once()
            self.losses += 1
            await self._context.event(f"{self._role}_lost", why=str(lost), losses=self.losses)
            if self.losses >= LIMIT or not lost.retryable:
                raise lost
            first = self._context.settings.restart_pause
            await asyncio.sleep(min(first * 2.0 ** (self.losses - 1), LONGEST_PAUSE))

    def suspect(self, error: RlhfdError, life: int) -> None:
        """Something that needs it failed: end it, so that a fresh one takes over. Of an earlier life it is late."""
        if life != self.life:
            return
        self._why = self._why or error
        self._suspected.set()

    async def _live_once(self) -> RlhfdError:
        """Start the child, put it into service, wait for its end; why it ended."""
        self._why, child = None, None
        self.life += 1
        self._suspected.clear()
        try:
            child = await self._spawn()
            await self._until_up(child)
            await self._context.event(f"{self._role}_ready", pid=child.pid)
            return await self._until_lost(child)
        except (EngineError, DeadlineError) as error:
            why = self._why or error
            return why if child is None else await self._explained(child, why)
        finally:
            self._on_loss()
            if child is not None:
                await asyncio.shield(child.terminate(GRACE) if self._why is None else child.kill())
                child.close_channel()

    async def _until_up(self, child: Child) -> None:
        """Run the bring-up, but give up as soon as the child is gone."""
        work, end = asyncio.create_task(self._bring_up(child)), asyncio.create_task(child.wait())
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self._died(child, end.result())
            work.result()
        finally:
            await _cancel(work, end)

    async def _until_lost(self, child: Child) -> RlhfdError:
        suspected, end = asyncio.create_task(self._suspected.wait()), asyncio.create_task(child.wait())
        try:
            await asyncio.wait({suspected, end}, return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return self._died(child, end.result())
            return await self._explained(child, self._why or EngineDiedError(f"the {self._role} was given up"))
        finally:
            await _cancel(suspected, end)

    async def _explained(self, child: Child, error: RlhfdError) -> RlhfdError:
        """A connection that breaks off is mostly a death that nobody has noticed yet: then the log says more."""
        if not isinstance(error, EngineDiedError):
            return error
        try:
            async with asyncio.timeout(LAST_WORDS):
                return self._died(child, await child.wait())
        except TimeoutError:
            return error

    def _died(self, child: Child, status: int) -> EngineDiedError:
        return EngineDiedError(
            f"the {self._role} ended ({describe_exit(status)}); the end of its log:\n{child.tail(LOG_LINES)}"
        )


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
