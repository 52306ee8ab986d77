"""The composition root: lock, db, devices, API, jobs, signals; what `rlhfd serve` runs.

READY after lock, migration, recovery of the tables and listening; replay and engine starts are a job's own work.
"""

import asyncio
import contextlib
import json
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

import rlhfd
from rlhfd.api import create_app, serve_api
from rlhfd.config import Settings
from rlhfd.core import procfs
from rlhfd.core.placement import Device
from rlhfd.core.places import cache_dir
from rlhfd.daemon.house import House
from rlhfd.daemon.notify import notify, watchdog_seconds
from rlhfd.daemon.service import DaemonService
from rlhfd.daemon.statedir import StateDir
from rlhfd.daemon.submit import Desk
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.devices import inventory
from rlhfd.engines.process import sweep
from rlhfd.errors import RlhfdError, StorageError
from rlhfd.pipeline.nursery import Nursery
from rlhfd.store import children, epochs
from rlhfd.store.db import Database

log = logging.getLogger("rlhfd")
STALE_WRITER = 30.0  # seconds after which the watchdog is no longer pinged


def main(settings: Settings, state_dir: Path, socket: Path) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Ends the process itself, so that no thread can hold it back."""
    status = 1
    try:
        status = uvloop.run(_guarded(settings, state_dir, socket))
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def _guarded(settings: Settings, state_dir: Path, socket: Path) -> int:
    try:
        await serve(settings, state_dir, socket)
    except RlhfdError as error:
        sys.stderr.write(f"rlhfd: {error}\n")
        return error.exit_status
    return 0


async def serve(settings: Settings, state_dir: Path, socket: Path) -> None:
    """One epoch, from lock to clean exit."""
    state = StateDir.take(state_dir)
    with contextlib.closing(state.lock):
        _log_to(state_dir / "logs" / "daemon.log")
        db = await Database.open(state.database)
        db.use_reserve = state.drop_ballast
        try:
            await _epoch(settings, state, db, socket)
        finally:
            await db.close()


async def _epoch(settings: Settings, state: StateDir, db: Database, socket: Path) -> None:
    boot = procfs.boot_id()
    epoch = await epochs.begin_epoch(db, pid=os.getpid(), boot_id=boot, version=rlhfd.__version__)
    for child in await children.stale_children(db, boot):
        await sweep(child.session_id, child.started_ticks)
        await children.forget_child(db, child)
    state.clear_leftovers()
    state.lay_ballast()
    nursery = Nursery(db)

    def devices() -> Sequence[Device]:
        found = inventory(cpu_devices=settings.cpu_devices)
        return [d for d in found if d.kind == "cpu" or settings.devices is None or d.id in settings.devices]

    house = House(
        state=state,
        db=db,
        settings=settings,
        epoch=epoch,
        nursery=nursery,
        cache=Path(settings.cache_dir) if settings.cache_dir else cache_dir(os.environ),
        inventory=devices,
    )
    supervisor = Supervisor(house)
    service = DaemonService(house=house, desk=Desk(house=house), supervisor=supervisor)
    watchdog = asyncio.create_task(_watchdog(db), name="watchdog")  # also of the drain
    try:
        async with serve_api(create_app(service), socket) as api:
            notify("READY=1", f"STATUS=epoch {epoch}, {len(devices())} devices")
            log.info("ready", extra={"fields": {"epoch": epoch, "socket": str(socket), "pid": os.getpid()}})
            await _until_signalled(supervisor, watchdog, api)
            notify("STOPPING=1")
            await supervisor.drain()
        await nursery.close()
        await epochs.mark_clean_exit(db)
    finally:
        watchdog.cancel()


async def _until_signalled(supervisor: Supervisor, *others: "asyncio.Task[None]") -> None:
    """Run the jobs until a signal; a supervisor, API or watchdog that ends by itself is a fault."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    running = asyncio.create_task(supervisor.run(), name="supervisor")
    signalled = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({running, signalled, *others}, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, signalled):
        task.cancel()
    await asyncio.wait({running, signalled})
    for task in done - {signalled}:
        task.result()
        raise StorageError(f"the daemon's {task.get_name()} ended by itself")


async def _watchdog(db: Database) -> None:
    """Ping the service manager while the loop and the writer are fresh."""
    pause = watchdog_seconds()
    while True:
        await asyncio.sleep(pause or 3600.0)
        if pause is not None and db.writer_age() < STALE_WRITER:
            notify("WATCHDOG=1")


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _log_to(path: Path) -> None:
    rotated = logging.handlers.RotatingFileHandler(path, maxBytes=16 * 1024 * 1024, backupCount=4)
    stderr = logging.StreamHandler(sys.stderr)
    for handler in (rotated, stderr):
        handler.setFormatter(_JsonLines())
        log.addHandler(handler)
    log.setLevel(logging.INFO)
