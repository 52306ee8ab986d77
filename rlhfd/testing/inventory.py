"""A machine that is not there: NVML replaced by readings, given to `devices.inventory` or written as a recording."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlhfd.devices import GIB, GpuProcess, GpuReading


class RecordedNvmlError(Exception):
    """As pynvml.NVMLError: `value` is NVML's code."""

    def __init__(self, message: str, value: int) -> None:
        super().__init__(message)
        self.value = value


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedMemory:
    """As pynvml's memory info, bytes."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedProcess:
    """As pynvml's process info."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - the name is pynvml's


class RecordedNvml:
    """The functions of pynvml that `rlhfd.devices` uses, over readings; a handle is an index.

    `fails_at_init`: the code with which nvmlInit raises (9: no driver, 12: no library, 18: driver and library differ).
    """

    NVMLError = RecordedNvmlError

    def __init__(self, readings: Sequence[GpuReading], *, fails_at_init: int | None = None) -> None:
        self._readings = readings
        self._fails_at_init = fails_at_init
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: D102, N802
        if self._fails_at_init is not None:
            raise RecordedNvmlError("recorded failure", self._fails_at_init)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: D102, N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: D102, N802
        return len(self._readings)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:  # noqa: D102, N802
        return index

    def nvmlDeviceGetUUID(self, handle: object, /) -> str:  # noqa: D102, N802
        return self._reading(handle).uuid

    def nvmlDeviceGetName(self, handle: object, /) -> str:  # noqa: D102, N802
        return self._reading(handle).name

    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> RecordedMemory:  # noqa: D102, N802
        reading = self._reading(handle)
        if reading.total is None:
            raise RecordedNvmlError(reading.error, 3)
        return RecordedMemory(total=reading.total, free=reading.total if reading.free is None else reading.free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> list[RecordedProcess]:  # noqa: D102, N802
        return [RecordedProcess(pid=p.pid, usedGpuMemory=p.memory) for p in self._reading(handle).processes]

    def _reading(self, handle: object) -> GpuReading:
        if not self.open or not isinstance(handle, int):
            raise RecordedNvmlError("Uninitialized", 1)
        return self._readings[handle]


def record(readings: Sequence[GpuReading], path: Path) -> None:
    """Write a recording that RLHFD_NVML_RECORDING may name."""
    path.write_bytes(msgspec.json.encode(list(readings)))


def uuid_of(number: int) -> str:
    """The UUID of the recorded machine's GPU `number`."""
    return f"GPU-{number:08x}-0000-4000-8000-00000000000{number}"


def _gpu(number: int, *processes: GpuProcess) -> GpuReading:
    held = sum(process.memory or 0 for process in processes)
    total = 80 * GIB
    return GpuReading(
        uuid=uuid_of(number), name="NVIDIA H100 80GB HBM3", total=total, free=total - held, processes=processes
    )


# Eight GPUs, numbers 2 and 5 in use by others, number 7 without a memory that can be read: five to be had.
EIGHT_GPUS: tuple[GpuReading, ...] = (
    _gpu(0),
    _gpu(1),
    _gpu(2, GpuProcess(pid=900_001, memory=30 * GIB)),
    _gpu(3),
    _gpu(4),
    _gpu(5, GpuProcess(pid=900_002, memory=70 * GIB), GpuProcess(pid=900_003)),
    _gpu(6),
    GpuReading(uuid=uuid_of(7), name="NVIDIA H100 80GB HBM3", error="Not Supported"),
)
