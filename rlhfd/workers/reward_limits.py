"""The fence around a reward worker: environment, resource limits, log size, stray processes.

The wall clock is the pool's, from outside. What is here holds even if the daemon stops looking.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from rlhfd.core import procfs

KEPT_ENVIRONMENT = frozenset(
    {
        *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
        *("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"),
        *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"),
        procfs.GUARD_VARIABLE,  # by it the daemon finds what outlives a killed guard
    }
)
FILE_BYTES = 64 * 1024**2  # largest file that user code may write, its log too
LOG_BYTES = (
    16 * 1024**2
)  # printing past this is dropped, so that the log never reaches FILE_BYTES and print never fails
OPEN_FILES = 256
CPU_SECONDS = 600  # of all threads, on top of 32 times the reward's timeout
CPU_PER_TIMEOUT = 32

_PR_SET_CHILD_SUBREAPER = 36


def strip_environment(work_dir: str) -> None:
    """Leave no token or password in the environment, no GPU in sight, and one thread to numeric libraries."""
    for key in os.environ.keys() - KEPT_ENVIRONMENT:
        del os.environ[key]
    os.environ.update(
        HOME=work_dir,
        TMPDIR=work_dir,
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONDONTWRITEBYTECODE="1",
    )


def apply_limits(*, memory_bytes: int) -> None:
    """Limit what user code may take. `memory_bytes` of private memory; 0 is no limit.

    RLIMIT_DATA and not RLIMIT_AS: libraries reserve address space by the gigabyte and never touch it.
    """
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    _lower(resource.RLIMIT_NOFILE, OPEN_FILES)
    if memory_bytes:
        _lower(resource.RLIMIT_DATA, memory_bytes)
    Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel's first choice when memory runs out
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a daemonised grandchild stays ours
    faulthandler.enable()


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (allowed, allowed))


def rearm_cpu_limit(timeout: float) -> None:
    """Give the next call its processor seconds; a worker lives long, so the limit moves with what it has used."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(time.process_time() + CPU_SECONDS + CPU_PER_TIMEOUT * timeout)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def quiet_streams() -> None:
    """Make prints reach the log line by line, and stdin empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(line_buffering=True, errors="backslashreplace")


def drop_output_of_a_full_log() -> None:
    """Send further output to nowhere once the log is large. A log that is a pipe has its reader's limits."""
    for stream in (1, 2):
        if os.fstat(stream).st_size < LOG_BYTES:
            continue
        os.write(stream, b"\nthis log is full: what rewards print from here on is dropped\n")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream)
        os.close(null)


def disarm_alarms() -> None:
    """Stop timers that a reward left running, or its handler would fire in our loop."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def children() -> set[int]:
    """The running children of this process, orphaned grandchildren included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ended meanwhile
            pids.update(int(pid) for pid in (task / "children").read_text().split())
    return {pid for pid in pids if procfs.read_process(pid) is not None}


def kill_strays(known: set[int]) -> list[int]:
    """Kill the children that are not `known`, and what they leave orphaned; return the pids of the first."""
    first = strays = sorted(children() - known)
    while strays:
        for pid in strays:
            with suppress(ProcessLookupError, ChildProcessError):  # a thread of the reward reaped it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        strays = sorted(children() - known)
    return first
