"""A daemon of its own for one experiment: started, awaited, measured from outside, ended."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY_SECONDS = 120.0
STOP_SECONDS = 180.0
LOOK_SECONDS = 0.5
LONGEST_SOCKET_PATH = 100  # bytes; the kernel's limit is 107


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process has used so far. CPU in seconds of one core, `at` on the monotonic clock, memory in bytes."""

    at: float
    cpu: float
    rss: int
    rss_peak: int

    def cpu_share_since(self, earlier: "Usage") -> float:
        """Share of one core, between two looks."""
        return (self.cpu - earlier.cpu) / (self.at - earlier.at)


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """A daemon that answers; its children's use is not counted in `usage`."""

    pid: int
    environ: Mapping[str, str]

    def usage(self) -> Usage:
        """As /proc has it now."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        user, system = int(fields[11]), int(fields[12])
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        kilobytes = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
        return Usage(
            at=time.monotonic(),
            cpu=(user + system) / os.sysconf("SC_CLK_TCK"),
            rss=int(kilobytes["VmRSS"]) * 1024,
            rss_peak=int(kilobytes["VmHWM"]) * 1024,
        )


@contextmanager
def serving(state: Path, log: Path, *, config: Path | None = None) -> Generator[Daemon]:
    """Run `rlhfd serve` on a state directory while the context is open; its output goes to `log`.

    Raises RuntimeError with the daemon's last words if it ends, or is not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="rlhfd-") as short, log.open("wb") as output:
        environ = {**os.environ, "RLHFD_STATE_DIR": str(state)}
        if len(os.fsencode(state / "rlhfd.sock")) > LONGEST_SOCKET_PATH:
            environ["RLHFD_SOCKET"] = f"{short}/rlhfd.sock"
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with ready:
            ready.bind(f"{short}/notify")
            child = subprocess.Popen(
                [sys.executable, "-m", "rlhfd", "serve", *(["--config", str(config)] if config else [])],
                env={**environ, "NOTIFY_SOCKET": f"{short}/notify"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the one who follows; the daemon is ended here
            )
            try:
                _await_ready(child, ready, log)
                yield Daemon(pid=child.pid, environ=environ)
            finally:
                _end(child)


def _await_ready(child: "subprocess.Popen[bytes]", ready: socket.socket, log: Path) -> None:
    """Wait for READY=1, as a service manager does."""
    deadline = time.monotonic() + READY_SECONDS
    ready.settimeout(LOOK_SECONDS)
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"rlhfd serve ended with status {child.returncode}: {_last_words(log)}")
        try:
            if b"READY=1" in ready.recv(4096):
                return
        except TimeoutError:
            continue
    raise RuntimeError(f"rlhfd serve was not ready within {READY_SECONDS:g} s: {_last_words(log)}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ask it to drain; insist only when it does not."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return " / ".join(lines[-3:]) or f"it wrote nothing to {log}"
