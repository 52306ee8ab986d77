"""Keeps one child process alive: bring it up, wait for its end, bring it up again with a growing pause.

consumes     the end of a child, or the word that it is suspect (a stream broke, a deadline ran out)
produces     a live child; after `LIMIT` losses without an applied step between them, the error that fails the job
waits for    the child's exit
unblocked by `suspect`, `close`
"""

import asyncio
from collections.abc import Awaitable, Callable

from rlhfd.engines.process import Child
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, RlhfdError
from rlhfd.pipeline.context import Context

LIMIT = 5
LONGEST_PAUSE = 60.0  # seconds


class Keeper:
    """One role of one job attempt."""

    def __init__(
        self,
        context: Context,
        role: str,
        spawn: Callable[[], Awaitable[Child]],
        bring_up: Callable[[Child], Awaitable[None]],
        on_loss: Callable[[], None],
    ) -> None:
        self._context = context
        self._role = role
        self._spawn = spawn
        self._bring_up = bring_up
        self._on_loss = on_loss
        self._child: Child | None = None
        self._why: RlhfdError | None = None
        self.losses = 0

    async def run(self) -> None:
        """Until cancelled. Raises the last error after `LIMIT` losses in a row, with the log's last lines."""
        while True:
            lost = await self._live_once()
            self.losses += 1
            await self._context.event(f"{self._role}_lost", why=str(lost), losses=self.losses)
            if self.losses > LIMIT or not lost.retryable:
                raise lost
            await asyncio.sleep(min(2.0 ** (self.losses - 1), LONGEST_PAUSE))

    async def _live_once(self) -> RlhfdError:
        """Start the child, put it into service, wait for its end; why it ended."""
        self._why, child = None, None
        try:
            child = self._child = await self._spawn()
            await self._while_alive(child, self._bring_up(child))
            await self._context.event(f"{self._role}_ready", pid=child.pid)
            status = await child.wait()
            return self._why or self._died(child, status)
        except (EngineError, DeadlineError) as error:
            return self._why or error
        finally:
            self._on_loss()
            if child is not None:
                await asyncio.shield(self.stop_child(child))

    async def _while_alive(self, child: Child, bring_up: Awaitable[None]) -> None:
        """Run the bring-up, but give up as soon as the child is gone."""
        work, end = asyncio.ensure_future(bring_up), asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise self._why or self._died(child, end.result())
            work.result()
        finally:
            for task in (work, end):
                task.cancel()
            await asyncio.gather(work, end, return_exceptions=True)

    def _died(self, child: Child, status: int) -> EngineDiedError:
        return EngineDiedError(f"the {self._role} ended with status {status}; the end of its log:\n{child.tail(15)}")

    async def suspect(self, error: RlhfdError) -> None:
        """Something that needs it failed: end it, so that a fresh one takes over."""
        if self._child is not None and self._why is None:
            self._why = error
            self._child.kill()

    async def stop_child(self, child: Child) -> None:
        """End it, with its whole tree, and forget it."""
        await child.terminate(grace=5.0)
        await self._context.store.children.forget_child(child.pid, child.started_ticks)
        if self._child is child:
            self._child = None
