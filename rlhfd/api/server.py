"""The app on a unix socket, inside a loop that runs already and whose signals are somebody else's."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rlhfd.api.peer import PeerProtocol
from rlhfd.errors import AlreadyRunningError, DeadlineError, StorageError

MAX_PATH = 107  # bytes, sun_path of unix(7)
START_SECONDS = 10.0
DRAIN_SECONDS = 2  # for answers under way when the daemon stops; long polls are cut
PROBE_SECONDS = 2.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a signal of its own when it is ready."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def serve_api(app: FastAPI, socket_path: Path) -> AsyncGenerator[asyncio.Task[None]]:
    """Serve `app` on `socket_path` (mode 0660) while the context is open.

    Yields the server's task, which ends early only if the server fails. Raises AlreadyRunningError where a daemon
    answers on the socket, StorageError where the socket can't be made, DeadlineError where it does not get ready.
    """
    listener, inode = bind(socket_path)
    config = uvicorn.Config(
        app,
        http=PeerProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="api")
    try:
        await _until_ready(server, task, socket_path)
        yield task
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        _unlink_own(socket_path, inode)
    task.result()


async def _until_ready(server: _Server, task: asyncio.Task[None], path: Path) -> None:
    ready = asyncio.create_task(server.ready.wait())
    done, _ = await asyncio.wait({task, ready}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task in done:
        task.result()
    if not done:
        raise DeadlineError(f"the API did not get ready on {path} within {START_SECONDS:g} s")


def bind(path: Path) -> tuple[socket.socket, int]:
    """A bound socket, 0660, and its inode. A missing directory is made, 0750; a dead daemon's socket is replaced."""
    if len(os.fsencode(path)) > MAX_PATH:
        raise StorageError(f"the socket's path {path} is over {MAX_PATH} bytes; choose a shorter one with --socket")
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        _clear(path)
        return _bind(path)
    except OSError as error:
        raise StorageError(f"can't make the socket {path}: {error.strerror}; choose another with --socket") from error


def _bind(path: Path) -> tuple[socket.socket, int]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o660)  # nobody else could connect before: nothing listens yet
    except OSError:
        listener.close()
        raise
    return listener, path.stat().st_ino


def _clear(path: Path) -> None:
    """Remove what a dead daemon left. A live one, or anything that is no socket, stays and is refused."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StorageError(f"{path} is there and is no socket; move it away or choose another with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            pass  # its backlog is full: somebody listens
    raise AlreadyRunningError(f"another daemon answers on {path}; stop it, or choose another socket with --socket")


def _unlink_own(path: Path, inode: int) -> None:
    try:
        if path.lstat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        pass
