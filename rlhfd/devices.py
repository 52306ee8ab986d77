"""The devices of this machine: GPUs as NVML shows them, or, on a machine without one, disjoint sets of CPU cores.

    NVML, or a recording of it --readings--> judged by pid: ours or foreign --> core.placement.Device

A recording is a JSON list of `GpuReading`s named by RLHFD_NVML_RECORDING; a daemon then believes in that machine.
"""

import os
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from rlhfd.core.placement import Device
from rlhfd.errors import JobFileError, RlhfdError, UsageError

RECORDING = "RLHFD_NVML_RECORDING"
NO_NVML = frozenset({9, 12})  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND: a machine without NVIDIA
GIB = 1024**3


class MemoryInfo(Protocol):
    """pynvml's answer, bytes."""

    total: int
    free: int


class RunningProcess(Protocol):
    """pynvml's answer; `usedGpuMemory` in bytes, None where the driver does not say."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - the name is pynvml's


class Nvml(Protocol):
    """The part of pynvml that is used here; handles are whatever `nvmlDeviceGetHandleByIndex` gives."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: D102, N802 - names are pynvml's
    def nvmlShutdown(self) -> None: ...  # noqa: D102, N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: D102, N802
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object: ...  # noqa: D102, N802
    def nvmlDeviceGetUUID(self, handle: object, /) -> str: ...  # noqa: D102, N802
    def nvmlDeviceGetName(self, handle: object, /) -> str: ...  # noqa: D102, N802
    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> MemoryInfo: ...  # noqa: D102, N802
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> Sequence[RunningProcess]: ...  # noqa: D102, N802


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU. `memory` in bytes; None where the driver does not say."""

    pid: int
    memory: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """What NVML says of one GPU. Memory in bytes; `error`: why `total` or the GPU itself could not be read."""

    uuid: str
    name: str
    total: int | None = None
    free: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    error: str = ""


def inventory(
    *,
    nvml: Nvml | None = None,
    ours: AbstractSet[int] = frozenset(),
    cpu_devices: Sequence[Sequence[int]] | None = None,
) -> list[Device]:
    """Every device that jobs may be placed on, in NVML's order; core sets where there is no GPU.

    nvml: a stand-in for pynvml. ours: pids of our own children; a GPU on which another process holds memory is busy.
    cpu_devices: core lists from the settings, instead of two halves of the cores this process may use.
    A GPU whose memory can't be read is listed as unusable, with the reason. Raises RlhfdError where a driver is there
    and does not answer: falling back to CPU would only be slow without saying why.
    """
    readings = gpus(nvml)
    return [_gpu(reading, ours) for reading in readings] if readings else cpus(cpu_devices)


def gpus(nvml: Nvml | None = None) -> list[GpuReading]:
    """Readings of every GPU: from `nvml`, else the recording that the environment names, else pynvml; maybe none."""
    if nvml is None and (path := os.environ.get(RECORDING)):
        return recorded(Path(path))
    nvml = nvml or cast("Nvml", import_module("pynvml"))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in NO_NVML:
            return []
        raise _silent(error) from error
    try:
        return [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise _silent(error) from error
    finally:
        nvml.nvmlShutdown()


def _silent(error: Exception) -> RlhfdError:
    return RlhfdError(f"the NVIDIA driver does not answer ({error}); see what `nvidia-smi` says")


def recorded(path: Path) -> list[GpuReading]:
    """A recorded inventory. Raises UsageError for a file that is none."""
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=list[GpuReading])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{RECORDING} names {path}, which is no recorded inventory: {error}") from error


def _read(nvml: Nvml, index: int) -> GpuReading:
    uuid, name = f"gpu:{index}", "unknown GPU"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:  # a lost GPU, or one without a memory of its own
        return GpuReading(uuid=uuid, name=name, error=str(error))
    return GpuReading(uuid=uuid, name=name, total=memory.total, free=memory.free, processes=_processes(nvml, handle))


def _processes(nvml: Nvml, handle: object) -> tuple[GpuProcess, ...]:
    """Those that compute; a display's processes don't keep a job away. None where the driver lists none."""
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not supported there; the GPU works all the same
        return ()
    return tuple(GpuProcess(pid=process.pid, memory=process.usedGpuMemory) for process in running)


def _gpu(reading: GpuReading, ours: AbstractSet[int]) -> Device:
    foreign = [process for process in reading.processes if process.pid not in ours and process.memory != 0]
    return Device(
        id=reading.uuid,
        kind="gpu",
        name=reading.name,
        memory=reading.total or 0,
        busy_by=", ".join(map(_who, foreign)) or None,
        unusable=None if reading.total else f"its memory can't be read: {reading.error or 'it reports none'}",
    )


def _who(process: GpuProcess) -> str:
    held = "" if process.memory is None else f" holding {process.memory / GIB:.1f} GiB"
    return f"in use by process {process.pid}{held}"


def cpus(
    core_sets: Sequence[Sequence[int]] | None = None, *, physical: Callable[[int], int] | None = None
) -> list[Device]:
    """Core sets as devices: those given, else two halves of the cores that this process may use (one of one core).

    physical: cpu -> the least cpu of the same physical core; both threads of a core go to the same half.
    Raises JobFileError for sets that overlap, are empty, or hold a core that is not there.
    """
    allowed = os.sched_getaffinity(0)
    sets = _halves(sorted(allowed, key=lambda cpu: ((physical or _first_sibling)(cpu), cpu)))
    if core_sets is not None:
        sets = [tuple(cores) for cores in core_sets]
        _refuse_bad_sets(sets, allowed)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(sets)
    return [
        Device(
            id=f"cpu:{_ranges(cores)}",
            kind="cpu",
            name=f"{len(cores)} core{'' if len(cores) == 1 else 's'}",
            memory=memory,
            cores=cores,
        )
        for cores in map(tuple, map(sorted, sets))
    ]


def _halves(cores: Sequence[int]) -> list[tuple[int, ...]]:
    middle = (len(cores) + 1) // 2
    return [half for half in (tuple(cores[:middle]), tuple(cores[middle:])) if half]


def _refuse_bad_sets(sets: Sequence[tuple[int, ...]], allowed: AbstractSet[int]) -> None:
    cores = [cpu for cores in sets for cpu in cores]
    if not sets or not all(sets):
        raise JobFileError("cpu_devices in the settings has an empty core list; give each device at least one core")
    if len(set(cores)) < len(cores):
        raise JobFileError("cpu_devices in the settings names a core twice; the core lists must not overlap")
    if absent := sorted(set(cores) - allowed):
        raise JobFileError(f"cpu_devices in the settings names cores that this process may not use: {absent}")


def _first_sibling(cpu: int) -> int:
    """From the kernel's topology; the cpu itself where that is not shown."""
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("ascii")
        return int(listed.strip().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return cpu


def _ranges(cores: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5", the kernel's own notation; a single core as "0-0"."""
    runs: list[list[int]] = []
    for cpu in cores:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
