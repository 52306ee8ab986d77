"""Every child of this daemon, in the table from its start until it and its whole tree are gone (invariant 8)."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from rlhfd.core import procfs
from rlhfd.engines.process import Child, ChildSpec, spawn
from rlhfd.errors import RlhfdError
from rlhfd.store import children
from rlhfd.store.db import Database


class Nursery:
    """Starts children and forgets them when they are gone; one for the whole daemon."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._boot_id = procfs.boot_id()
        self._watches: set[asyncio.Task[None]] = set()

    async def spawn(self, spec: ChildSpec) -> Child:
        """A child that a new epoch would find. Raises EngineStartError; a caller cancelled meanwhile leaves none."""
        return await self.whole(self._spawned(spec))

    async def _spawned(self, spec: ChildSpec) -> Child:
        return await self.adopt(await spawn(spec))

    async def whole(self, start: Coroutine[Any, Any, Child]) -> Child:
        """The child of `start`; where the caller is cancelled meanwhile, none: half a start would leave a process."""
        starting = asyncio.create_task(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with suppress(RlhfdError):  # then there is none
                child = await starting
                await child.kill()
                child.close_channel()
            raise

    async def adopt(self, child: Child) -> Child:
        """The same for one that is running already; one that can't be recorded is ended."""
        row = children.ChildRow(
            pid=child.pid,
            session_id=child.session_id,
            started_ticks=child.started,
            boot_id=self._boot_id,
            epoch=child.spec.epoch,
            job_id=child.spec.job_id,
            role=child.spec.role,
        )
        try:
            await children.record_child(self._db, row)
        except RlhfdError:
            await child.kill()
            child.close_channel()
            raise
        watch = asyncio.create_task(self._forget(child, row), name=f"end of {row.role} {row.pid}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return child

    async def _forget(self, child: Child, row: children.ChildRow) -> None:
        await child.wait()
        await children.forget_child(self._db, row)

    async def close(self) -> None:
        """Every child has been told to end: wait until all are gone and forgotten."""
        await asyncio.gather(*self._watches)
