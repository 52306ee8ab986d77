"""Every child of this daemon, in the table from its start until it and its whole tree are gone (invariant 8)."""

import asyncio

from rlhfd.core import procfs
from rlhfd.engines.process import Child, ChildSpec, spawn
from rlhfd.store import children
from rlhfd.store.db import Database


class Nursery:
    """Starts children and forgets them when they are gone; one for the whole daemon."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._boot_id = procfs.boot_id()
        self._watches: set[asyncio.Task[None]] = set()

    async def spawn(self, spec: ChildSpec) -> Child:
        """A child that a new epoch would find. Raises EngineStartError."""
        return await self.adopt(await spawn(spec))

    async def adopt(self, child: Child) -> Child:
        """The same for one that is running already."""
        row = children.ChildRow(
            pid=child.pid,
            session_id=child.session_id,
            started_ticks=child.started,
            boot_id=self._boot_id,
            epoch=child.spec.epoch,
            job_id=child.spec.job_id,
            role=child.spec.role,
        )
        await children.record_child(self._db, row)
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
