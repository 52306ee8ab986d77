"""The inventory: GPUs by UUID with who uses them, core sets where there are none."""

import os
import subprocess
import sys

import pynvml
import pytest

from rlhfd.core.placement import Lease, Wait, place
from rlhfd.devices import GIB, RECORDING, GpuProcess, GpuReading, Nvml, cpus, gpus, inventory
from rlhfd.errors import JobFileError, RlhfdError, UsageError
from rlhfd.testing.inventory import EIGHT_GPUS, RecordedNvml, record, uuid_of

WANTS = {"generator": 1, "learner": 1}


def eight(ours: frozenset[int] = frozenset()):
    return inventory(nvml=RecordedNvml(EIGHT_GPUS), ours=ours)


def test_every_gpu_is_listed_by_its_uuid_with_its_memory():
    devices = eight()
    assert [device.id for device in devices] == [uuid_of(number) for number in range(8)]
    assert {device.memory for device in devices[:7]} == {80 * GIB}
    assert {device.kind for device in devices} == {"gpu"}


def test_a_gpu_that_others_compute_on_is_busy_with_their_names():
    devices = eight()
    assert [n for n, device in enumerate(devices) if device.busy_by] == [2, 5]
    assert devices[2].busy_by == "in use by process 900001 holding 30.0 GiB"
    assert devices[5].busy_by == "in use by process 900002 holding 70.0 GiB, in use by process 900003"


def test_our_own_children_do_not_make_a_gpu_busy():
    devices = eight(ours=frozenset({900_001, 900_002}))
    assert [n for n, device in enumerate(devices) if device.busy_by] == [5]
    assert devices[5].busy_by == "in use by process 900003"


def test_a_process_that_holds_no_memory_does_not_make_a_gpu_busy():
    idle = GpuReading(uuid="GPU-a", name="x", total=GIB, processes=(GpuProcess(pid=5, memory=0),))
    assert inventory(nvml=RecordedNvml([idle]))[0].busy_by is None


def test_a_gpu_without_readable_memory_is_listed_as_unusable():
    assert [n for n, device in enumerate(eight()) if device.unusable] == [7]
    assert eight()[7].unusable == "its memory can't be read: Not Supported"


def test_two_jobs_get_disjoint_gpus_and_a_third_waits_and_says_for_what():
    leased: dict[str, str] = {}
    for job in (1, 2):
        lease = place(WANTS, eight(), leased)
        assert isinstance(lease, Lease)
        assert not set(lease.ids) & set(leased)
        leased |= dict.fromkeys(lease.ids, f"job {job}")
    assert list(leased) == [uuid_of(n) for n in (0, 1, 3, 4)]
    third = place(WANTS, eight(), leased)
    assert isinstance(third, Wait)
    assert f"{uuid_of(0)} (job 1)" in third.reason
    assert f"{uuid_of(4)} (job 2)" in third.reason
    assert f"{uuid_of(2)} (in use by process 900001" in third.reason


def test_a_recording_in_the_environment_stands_in_for_the_machine(tmp_path, monkeypatch):
    record(EIGHT_GPUS, tmp_path / "eight.json")
    monkeypatch.setenv(RECORDING, str(tmp_path / "eight.json"))
    assert inventory() == eight()


@pytest.mark.parametrize("content", [None, "{", '[{"uuid": 1}]', '{"gpus": []}'])
def test_a_recording_that_is_none_is_refused_by_name(tmp_path, monkeypatch, content):
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(RECORDING, str(path))
    with pytest.raises(UsageError, match=r"RLHFD_NVML_RECORDING names .*broken\.json, which is no recorded inventory"):
        inventory()


@pytest.mark.parametrize("code", [9, 12])
def test_a_machine_without_driver_or_library_has_core_sets(code):
    devices = inventory(nvml=RecordedNvml([], fails_at_init=code))
    assert {device.kind for device in devices} == {"cpu"}


def test_a_driver_that_does_not_answer_is_an_error_and_not_a_slow_machine():
    with pytest.raises(RlhfdError, match="the NVIDIA driver does not answer"):
        inventory(nvml=RecordedNvml([], fails_at_init=18))


def test_nvml_is_shut_down_whatever_happens():
    class Lost(RecordedNvml):
        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            raise RecordedNvml.NVMLError("GPU is lost", 15)

    well, lost = RecordedNvml(EIGHT_GPUS), Lost(EIGHT_GPUS)
    gpus(well)
    with pytest.raises(RlhfdError, match=r"the NVIDIA driver does not answer \(GPU is lost\)"):
        gpus(lost)
    assert well.open == lost.open == 0


def test_a_lost_gpu_is_unusable_and_the_others_are_not():
    class OneLost(RecordedNvml):
        def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:  # noqa: N802
            if index == 0:
                raise RecordedNvml.NVMLError("GPU is lost", 15)
            return index

    devices = inventory(nvml=OneLost(EIGHT_GPUS))
    assert devices[0].id == "gpu:0"
    assert devices[0].unusable == "its memory can't be read: GPU is lost"
    assert devices[1].unusable is None


def test_a_driver_that_lists_no_processes_leaves_the_gpu_usable():
    class Quiet(RecordedNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> list:  # noqa: N802
            raise RecordedNvml.NVMLError("Not Supported", 3)

    assert [device.busy_by for device in inventory(nvml=Quiet(EIGHT_GPUS))] == [None] * 8


def test_pynvml_has_every_name_that_the_recording_stands_in_for():
    names = [name for name in vars(Nvml) if name.startswith("nvml")] + ["NVMLError"]
    assert len(names) == 9
    assert all(hasattr(pynvml, name) and hasattr(RecordedNvml, name) for name in names)


def test_the_real_machine_has_devices_of_one_kind(monkeypatch):
    monkeypatch.delenv(RECORDING, raising=False)
    devices = inventory()
    assert devices
    assert len({device.id for device in devices}) == len(devices)
    assert len({device.kind for device in devices}) == 1


# --- core sets -----------------------------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch):
    def allow(*numbers: int) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(numbers))

    return allow


def sets(devices) -> list[tuple[str, tuple[int, ...]]]:
    return [(device.id, device.cores) for device in devices]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ((0, 1), [("cpu:0-0", (0,)), ("cpu:1-1", (1,))]),
        ((3,), [("cpu:3-3", (3,))]),
        ((0, 1, 2), [("cpu:0-1", (0, 1)), ("cpu:2-2", (2,))]),
        ((0, 2, 4, 5), [("cpu:0-0,2-2", (0, 2)), ("cpu:4-5", (4, 5))]),
        (tuple(range(8)), [("cpu:0-3", (0, 1, 2, 3)), ("cpu:4-7", (4, 5, 6, 7))]),
    ],
)
def test_the_cores_that_may_be_used_are_split_in_two(cores, allowed, expected):
    cores(*allowed)
    assert sets(cpus(physical=lambda cpu: cpu)) == expected


def test_both_threads_of_a_core_go_to_the_same_half(cores):
    cores(*range(8))
    assert sets(cpus(physical=lambda cpu: cpu % 4)) == [
        ("cpu:0-1,4-5", (0, 1, 4, 5)),
        ("cpu:2-3,6-7", (2, 3, 6, 7)),
    ]


def test_two_threads_of_one_core_still_make_two_devices(cores):
    cores(0, 1)
    assert [device.cores for device in cpus(physical=lambda cpu: 0)] == [(0,), (1,)]


def test_the_settings_name_the_core_sets(cores):
    cores(*range(6))
    assert sets(cpus([[5, 4], [0, 1, 2]])) == [("cpu:4-5", (4, 5)), ("cpu:0-2", (0, 1, 2))]


def test_core_sets_share_the_machines_memory(cores):
    cores(0, 1)
    one, two = cpus()
    assert one.memory == two.memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


@pytest.mark.parametrize(
    ("core_sets", "said"),
    [
        ([], "empty core list"),
        ([[0], []], "empty core list"),
        ([[0, 1], [1]], "names a core twice"),
        ([[0], [9]], r"may not use: \[9\]"),
    ],
)
def test_core_sets_that_make_no_sense_are_refused(cores, core_sets, said):
    cores(0, 1)
    with pytest.raises(JobFileError, match=said):
        cpus(core_sets)


def test_importing_devices_is_cheap():
    code = (
        "import sys, rlhfd.devices; print([m for m in ('pynvml', 'msgspec', 'torch', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
