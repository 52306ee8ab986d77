"""Small process trees for tests of the guard, and waits that end by a signal of the kernel rather than by sleeping."""

import os
import select
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhfd.core import procfs

# Three processes: the child; its child; and a grandchild that left session and parent and ignores SIGTERM.
TREE = """
import os, signal, sys
report = os.open(sys.argv[1], os.O_WRONLY)
def stay():
    os.write(report, f"{os.getpid()}\\n".encode())
    while True:
        signal.pause()
if os.fork() == 0:
    stay()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        stay()
    os._exit(0)
os.wait() if len(sys.argv) > 2 else None
stay()
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *arguments)


class Reports:
    """A fifo in which the processes of a tree write their pids, one line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)

    def pids(self, n: int, seconds: float = 20.0) -> list[int]:
        data = b""
        while data.count(b"\n") < n:
            ready, _, _ = select.select([self._fd], [], [], seconds)
            assert ready, f"fewer than {n} processes reported within {seconds} s: {data!r}"
            data += os.read(self._fd, 4096)
        return [int(line) for line in data.split()]

    def close(self) -> None:
        os.close(self._fd)


def watch(pids: Iterable[int]) -> list[int]:
    """Descriptors that become readable when the processes end: open them while they live."""
    return [os.pidfd_open(pid) for pid in pids]


def ended(pidfds: list[int], seconds: float) -> bool:
    """Whether all of them end in time."""
    left = set(pidfds)
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    while left:
        ready = poll.poll(seconds * 1000)
        if not ready:
            break
        for fd, _ in ready:
            poll.unregister(fd)
            left.discard(fd)
    for fd in pidfds:
        os.close(fd)
    return not left


def alive(pid: int) -> bool:
    return procfs.read_process(pid) is not None
