"""Start a child under its guard, watch it, end it, and leave nothing behind.

    spawn(ChildSpec) ─exec─► guard (session leader, subreaper) ─exec─► the child ─► its own children
    daemon ══ death pipe ══► guard           EOF: the daemon is gone; `k`: kill the tree now
    daemon ◄═ socketpair ══► the child       only with `channel=True`; its number in RLHFD_CHANNEL_FD

A guard that is killed itself leaves its tree alive; the daemon then sweeps by session id and by the guard's mark.
Must be called from the loop's thread, and that thread must live as long as the daemon: the guard's death signal
follows the thread that forked it.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from site import getsitepackages

import rlhfd
from rlhfd.core import procfs
from rlhfd.core.faults import NO_ROOM
from rlhfd.core.types import Epoch, JobId
from rlhfd.errors import DeadlineError, DiskFullError, EngineStartError

CHANNEL_VARIABLE = "RLHFD_CHANNEL_FD"
GUARD_LIMIT = 2.0  # seconds in which a guard ends its tree
SWEEP_LIMIT = 2.0
POLL = 0.02
TAIL_BYTES = 64 * 1024

# What a child may know of the daemon's environment; everything else is said in its spec.
INHERITED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "CUDA_HOME",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "RLHFD_CRASH_AT",
)
ALWAYS = {
    "HF_HUB_OFFLINE": "1",  # downloads happen at submit
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",  # the last log lines before a crash are the ones that matter
    "PYTHONSAFEPATH": "1",  # a module in the working directory must not stand in for a library
}


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One child. `cores`: CPU cores it may use, None for all; `gpus`: UUIDs it may see; `env` overrides the base.

    Example: ChildSpec(role="learner", job_id=JobId(3), attempt=1, epoch=Epoch(7), cores=(1,), channel=True,
    argv=(sys.executable, "-m", "rlhfd.workers.learner"), log_path=Path("jobs/3/logs/learner.1.log"))
    """

    role: str
    job_id: JobId | None
    attempt: int
    epoch: Epoch
    argv: tuple[str, ...]
    log_path: Path
    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    channel: bool = False


def environment(spec: ChildSpec) -> dict[str, str]:
    """The child's whole environment: a clean base, its devices, its threads, then what the spec says."""
    env = {name: os.environ[name] for name in INHERITED if name in os.environ} | ALWAYS
    package_root = str(Path(rlhfd.__file__).parents[1])
    if package_root not in getsitepackages():  # a source tree: the child must find the same one
        env["PYTHONPATH"] = package_root
    env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if spec.cores is not None:
        env["OMP_NUM_THREADS"] = str(len(spec.cores))
    return env | dict(spec.env)


def describe_exit(status: int) -> str:
    """A `Child` status in words: "exit status 3", "SIGKILL", "its guard was killed by SIGKILL"."""
    if status < 0:
        return f"its guard was killed by {signal.Signals(-status).name}"
    if status > 128 and status - 128 in signal.valid_signals():
        return signal.Signals(status - 128).name
    return f"exit status {status}"


async def spawn(spec: ChildSpec) -> "Child":
    """Start the child under a guard. Raises EngineStartError where the guard itself cannot be started.

    DiskFullError where there is no room for its log. A command that cannot be executed shows as status 127 and a line
    in the log.
    """
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    death_read, death_write = os.pipe()
    ours, theirs = socket.socketpair() if spec.channel else (None, None)
    env, inherited = environment(spec), [death_read]
    if theirs is not None:
        inherited.append(theirs.fileno())
        env[CHANNEL_VARIABLE] = str(theirs.fileno())
    try:
        with spec.log_path.open("ab") as log:
            log_start = log.tell()
            process = await asyncio.create_subprocess_exec(
                *_guarded(spec, death_read),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=env,
                cwd=spec.log_path.parent,
                pass_fds=inherited,
                start_new_session=True,
            )
    except OSError as error:
        os.close(death_write)
        if ours is not None:
            ours.close()
        kind = DiskFullError if error.errno in NO_ROOM else EngineStartError
        raise kind(f"the {spec.role} could not be started: {error}") from error
    finally:
        os.close(death_read)
        if theirs is not None:
            theirs.close()
    if ours is not None:
        ours.setblocking(False)
    return Child(spec=spec, process=process, death_fd=death_write, channel_socket=ours, log_start=log_start)


def _guarded(spec: ChildSpec, death_fd: int) -> list[str]:
    cores = ["--cores", ",".join(map(str, spec.cores))] if spec.cores else []
    options = ["--death-fd", str(death_fd), "--epoch", str(spec.epoch), *cores]
    return [sys.executable, "-m", "rlhfd.workers.guard", *options, "--", *spec.argv]


class Child:
    """A running child. `pid` is its guard's, and the session id of its tree; `started` in clock ticks after boot."""

    def __init__(
        self,
        *,
        spec: ChildSpec,
        process: asyncio.subprocess.Process,
        death_fd: int,
        channel_socket: socket.socket | None,
        log_start: int,
    ) -> None:
        self.spec = spec
        self.pid = process.pid
        self.started = procfs.start_ticks(process.pid) or 0
        self.channel_socket = channel_socket
        self.log_start = log_start
        self._process = process
        self._death_fd: int | None = death_fd
        self._end = asyncio.create_task(self._until_gone(), name=f"{spec.role} of job {spec.job_id}")

    @property
    def session_id(self) -> int:
        """Every process of the tree that did not leave it is in this session."""
        return self.pid

    @property
    def status(self) -> int | None:
        """None while it runs. Negative: signal that killed the guard; 128 + n: signal n killed the child."""
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """The status, once the child *and* its whole tree are gone."""
        return await asyncio.shield(self._end)

    async def terminate(self, grace: float) -> int:
        """SIGTERM to the child; after `grace` seconds the whole tree is killed. Returns the status."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace):
                return await self.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill the whole tree at once. Returns the status."""
        if self._death_fd is not None:
            with suppress(BrokenPipeError):
                os.write(self._death_fd, b"k")
        try:
            async with asyncio.timeout(GUARD_LIMIT):
                return await self.wait()
        except TimeoutError:  # the guard is stopped or stuck: without it, sweep
            with suppress(ProcessLookupError):
                self._process.kill()
            return await self.wait()

    def close_channel(self) -> None:
        """Give our end of its channel back. Call it when the child has ended: calls in flight then have ended too."""
        if self.channel_socket is not None:
            self.channel_socket.close()

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log, of this start only."""
        with self.spec.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, size - TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    async def _until_gone(self) -> int:
        status = await self._process.wait()
        if self._death_fd is not None:
            os.close(self._death_fd)
            self._death_fd = None
        await sweep(self.session_id, self.started)
        return status


async def sweep(session_id: int, started: int) -> int:
    """Kill what is left of the tree of a guard recorded in this boot, and remove its shared memory; how many it hit.

    Compare `procfs.boot_id()` first: of another boot nothing is left. Safe where the pid was reused since.
    Raises DeadlineError naming the processes that SIGKILL did not end within 2 s.
    """
    left = await asyncio.to_thread(procfs.remains, session_id, started)
    memory = procfs.shared_memory(left)
    hit = {process.pid for process in left}
    try:
        async with asyncio.timeout(SWEEP_LIMIT):
            while left:
                for process in left:
                    procfs.send(process, signal.SIGKILL)
                await asyncio.sleep(POLL)
                left = await asyncio.to_thread(procfs.remains, session_id, started)
                hit |= {process.pid for process in left}
    except TimeoutError:
        pids = ", ".join(str(process.pid) for process in left)
        raise DeadlineError(f"processes {pids} of session {session_id} did not end within 2 s of SIGKILL") from None
    procfs.remove_shared_memory(memory)
    return len(hit)
