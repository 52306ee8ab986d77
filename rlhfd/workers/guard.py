"""Stand between the daemon and one child, and leave nothing of the child's tree behind.

`python -m rlhfd.workers.guard --death-fd N [--epoch E] [--cores 0,1] -- COMMAND…`

- consumes: the read end N of a pipe whose other end only the daemon has; EOF means that the daemon is gone, a byte
  `k` that the tree shall be killed at once; SIGTERM and SIGINT, which it hands to the child.
- produces: the child's exit status (128 + n where signal n killed it); its own death by a signal is therefore
  always visible as such.
- The guard leads a session of its own and is the subreaper of its descendants, so a grandchild that forks twice or
  calls setsid is still found. It ends the tree within 2 s: SIGTERM, half a second, SIGKILL until nobody is left.

Standard library only, because every child pays for its start.
"""

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhfd.core import procfs

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TERM_GRACE = 0.5
POLL = 0.02
LOOK_EVERY = 2.0
CANNOT_START = 126
NOT_FOUND = 127
KILL_FIRST_SCORE = "500"  # the kernel's OOM killer shall take an engine rather than the daemon


class Arguments(NamedTuple):
    """The guard's own command line."""

    death_fd: int
    epoch: int
    cores: frozenset[int]
    command: list[str]


def parse(argv: list[str]) -> Arguments:
    """Options in pairs, then `--`, then the command. Raises ValueError."""
    cut = argv.index("--")
    options = dict(zip(argv[:cut:2], argv[1:cut:2], strict=True))
    cores = options.get("--cores", "")
    return Arguments(
        death_fd=int(options["--death-fd"]),
        epoch=int(options.get("--epoch", "0")),
        cores=frozenset(int(core) for core in cores.split(",") if core),
        command=argv[cut + 1 :],
    )


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Guard:
    """One child tree, from exec to the last reaped orphan."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self._daemon = os.getppid()
        self._child = 0  # 0 once it is reaped
        self._status = 0
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._shared_memory: set[str] = set()
        self._seen_names: set[str] = set()
        self._kill_at_once = False

    def run(self) -> int:
        """Start the child, wait for its end or the daemon's, end the tree. Returns the exit status."""
        self._prepare()
        self._child = self._fork()
        poll = select.poll()
        poll.register(self._arguments.death_fd, select.POLLIN | select.POLLHUP)
        poll.register(self._wake, select.POLLIN)
        while self._child and not self._daemon_is_gone(poll.poll(int(LOOK_EVERY * 1000))):
            self._reap()
            self._look_for_shared_memory()
        self._end_tree()
        return self._status

    def _prepare(self) -> None:
        if os.getsid(0) != os.getpid():
            os.setsid()
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if self._arguments.cores:
            os.sched_setaffinity(0, self._arguments.cores)
        os.set_inheritable(self._arguments.death_fd, False)
        os.environ["RLHFD_EPOCH"] = str(self._arguments.epoch)
        os.environ[procfs.GUARD_VARIABLE] = procfs.guard_mark(os.getpid(), procfs.start_ticks(os.getpid()) or 0)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _only_wake)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._hand_on)

    def _hand_on(self, signum: int, _frame: object) -> None:
        if self._child:
            os.kill(self._child, signum)  # ours and not reaped yet, so the pid can't be another's

    def _fork(self) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            _become_the_child(parent)
            os.execvp(self._arguments.command[0], self._arguments.command)  # noqa: S606
        except OSError as error:
            sys.stderr.write(f"guard: cannot execute {self._arguments.command[0]}: {error.strerror}\n")
            sys.stderr.flush()
        finally:
            os._exit(NOT_FOUND)

    def _daemon_is_gone(self, ready: list[tuple[int, int]]) -> bool:
        """True after EOF or a `k` on the death pipe, or when the parent is another than at the start."""
        for fd, _ in ready:
            data = os.read(fd, 64)
            if fd == self._arguments.death_fd:
                self._kill_at_once = data == b"k"
                return True
        return os.getppid() != self._daemon

    def _reap(self) -> None:
        """Collect every dead child, adopted orphans too, and the status of ours."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self._child:
                    self._child = 0
                    code = os.waitstatus_to_exitcode(ended[1])
                    self._status = 128 - code if code < 0 else code

    def _look_for_shared_memory(self) -> None:
        """Learn what the tree made while it lives: afterwards nothing says whose a segment was."""
        names = {path.name for path in Path(procfs.SHARED_MEMORY).iterdir()}
        if names != self._seen_names:
            self._seen_names = names
            self._shared_memory |= procfs.shared_memory(procfs.tree(os.getpid()))

    def _end_tree(self) -> None:
        self._shared_memory |= procfs.shared_memory(procfs.tree(os.getpid()))
        if not self._kill_at_once:
            self._signal_until_gone(signal.SIGTERM, TERM_GRACE)
        self._signal_until_gone(signal.SIGKILL, float("inf"))
        procfs.remove_shared_memory(self._shared_memory)

    def _signal_until_gone(self, signum: signal.Signals, seconds: float) -> None:
        """SIGTERM is sent once to each process, SIGKILL until nobody is left."""
        told: set[procfs.Process] = set()
        until = time.monotonic() + seconds
        while (left := procfs.tree(os.getpid())) and time.monotonic() < until:
            for process in left:
                if process not in told:
                    procfs.send(process, signum)
                    told.add(process)
            time.sleep(POLL)
            self._reap()
        self._reap()


def _only_wake(_signum: int, _frame: object) -> None:
    """The wakeup descriptor does the work; without a handler the kernel would not write to it."""


def _become_the_child(guard: int) -> None:
    """Between fork and exec: die with the guard, no inherited handlers, first in line for the OOM killer."""
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(CANNOT_START)
    Path("/proc/self/oom_score_adj").write_text(KILL_FIRST_SCORE)


def main(argv: list[str]) -> int:
    """The exit status; 126 with one line on stderr where the child could not be prepared."""
    try:
        return Guard(parse(argv)).run()
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"guard: cannot start the child: {error}\n")
        return CANNOT_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
