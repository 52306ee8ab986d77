"""Read the process table: who descends from whom, who shares a session, what shared memory they hold.

Shared by the guard (inside the children) and the daemon's sweep. A process is named by pid *and* start time, because
pids are reused; a signal is sent through a pidfd after the start time was checked, so it can't hit a successor.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHARED_MEMORY = "/dev/shm/"  # noqa: S108  (the kernel's own place, not a temporary file of ours)
ENGINE_LEFTOVERS = ("psm_", "sem.mp-")  # what multiprocessing names its segments and semaphores
GUARD_VARIABLE = "RLHFD_GUARD"


class Process(NamedTuple):
    """One live (not zombie) process. `started`: clock ticks after boot."""

    pid: int
    parent: int
    session: int
    started: int


def read_process(pid: int) -> Process | None:
    """The process with that pid, or None where there is none or only its zombie."""
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in {b"Z", b"X"}:
        return None
    return Process(pid=pid, parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None where there is none. A zombie counts."""
    try:
        return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def boot_id() -> str:
    """The kernel's name for this boot: start ticks and pids of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def processes() -> Iterator[Process]:
    """All live processes."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (found := read_process(int(entry.name))) is not None:
            yield found


def guard_mark(pid: int, started: int) -> str:
    """Value of the variable by which a guard marks its tree."""
    return f"{pid}:{started}"


def tree(root: int) -> list[Process]:
    """Every descendant of `root` and every member of its session, without `root` itself."""
    table = list(processes())
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found = {p.pid: p for p in table if p.session == root}
    frontier = [root]
    while frontier:
        for process in children.get(frontier.pop(), ()):
            found[process.pid] = process
            frontier.append(process.pid)
    found.pop(root, None)
    return list(found.values())


def remains(session: int, started: int) -> list[Process]:
    """What is left of the tree of a guard that had pid `session` and start time `started`, the guard included.

    Found by session id and by the guard's mark in the environment: some engines rewrite their environment, some
    grandchildren leave the session. Where the pid belongs to another process now, its session is not ours.
    """
    reused = start_ticks(session) not in {None, started}
    mark = f"{GUARD_VARIABLE}={guard_mark(session, started)}".encode()
    return [p for p in processes() if (p.session == session and not reused) or _is_marked(p.pid, mark)]


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or not ours to read
        return False


def send(process: Process, signum: signal.Signals) -> None:
    """Signal exactly this process; nothing happens where it is gone."""
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(process.pid)
        try:
            if start_ticks(process.pid) == process.started:
                signal.pidfd_send_signal(fd, signum)
        finally:
            os.close(fd)


def shared_memory(members: Iterable[Process]) -> set[str]:
    """Paths of the multiprocessing segments and semaphores that these processes have mapped.

    By inode: a semaphore is mapped under a temporary name before it gets its own.
    """
    inodes: set[int] = set()
    for process in members:
        try:
            maps = (PROC / str(process.pid) / "maps").read_text(errors="replace")
        except OSError:  # gone, or not ours to read
            continue
        inodes |= {int(line.split(None, 5)[4]) for line in maps.splitlines() if SHARED_MEMORY in line}
    return {str(path) for path, inode in _leftovers() if inode in inodes}


def _leftovers() -> Iterator[tuple[Path, int]]:
    for path in Path(SHARED_MEMORY).iterdir():
        with suppress(FileNotFoundError):
            if path.name.startswith(ENGINE_LEFTOVERS):
                yield path, path.stat().st_ino


def remove_shared_memory(paths: Iterable[str]) -> None:
    """Unlink what the dead left behind."""
    for path in paths:
        with suppress(FileNotFoundError, PermissionError):
            os.unlink(path)  # noqa: PTH108  (one import less in the guard's path)
