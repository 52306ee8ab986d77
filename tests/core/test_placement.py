"""Placement gives disjoint devices, waits with a reason, and refuses what can never be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.core.placement import Device, Lease, Wait, place
from rlhfd.errors import JobFileError


def core_set(number: int) -> Device:
    return Device(id=f"cpu:{number}-{number}", kind="cpu", name="1 core", memory=8 << 30, cores=(number,))


def gpu(number: int, *, busy_by: str | None = None, unusable: str | None = None) -> Device:
    return Device(id=f"GPU-{number}", kind="gpu", name="H100", memory=80 << 30, busy_by=busy_by, unusable=unusable)


CORES = [core_set(0), core_set(1)]


def ids(lease: Lease | Wait) -> dict[str, tuple[str, ...]]:
    assert isinstance(lease, Lease), lease
    return {role: tuple(device.id for device in held) for role, held in lease.devices.items()}


def reason(answer: Lease | Wait) -> str:
    assert isinstance(answer, Wait), answer
    return answer.reason


def test_two_core_sets_go_one_to_the_generator_and_one_to_the_learner():
    assert ids(place({"learner": 1, "generator": 1}, CORES, {})) == {
        "generator": ("cpu:0-0",),
        "learner": ("cpu:1-1",),
    }


def test_a_share_is_the_same_devices_and_leases_them_once():
    lease = place({"generator": 1, "learner": 1, "scorer": "share:learner"}, CORES, {})
    assert ids(lease)["scorer"] == ids(lease)["learner"] == ("cpu:1-1",)
    assert lease.ids == ("cpu:0-0", "cpu:1-1")


def test_a_share_may_go_through_another():
    lease = place({"generator": 2, "learner": "share:generator", "scorer": "share:learner"}, CORES, {})
    assert set(ids(lease).values()) == {("cpu:0-0", "cpu:1-1")}
    assert lease.ids == ("cpu:0-0", "cpu:1-1")


def test_leased_and_busy_devices_are_passed_over():
    devices = [gpu(0), gpu(1, busy_by="in use by process 7"), gpu(2), gpu(3)]
    lease = place({"generator": 1, "learner": 1}, devices, {"GPU-0": "job 1"})
    assert lease.ids == ("GPU-2", "GPU-3")


def test_waiting_names_the_devices_and_who_holds_them():
    devices = [gpu(0), gpu(1, busy_by="in use by process 7"), gpu(2), gpu(3, unusable="no memory")]
    said = reason(place({"generator": 1, "learner": 1}, devices, {"GPU-0": "job 1"}))
    assert "needs 2 devices" in said
    assert "GPU-0 (job 1)" in said
    assert "GPU-1 (in use by process 7)" in said
    assert "GPU-2" not in said
    assert "GPU-3" not in said


def test_a_leased_device_is_its_holders_whatever_runs_on_it():
    busy = [gpu(0, busy_by="in use by process 7")]
    assert "GPU-0 (job 1)" in reason(place({"generator": 1}, busy, {"GPU-0": "job 1"}))


def test_more_than_the_machine_has_is_refused_with_what_it_has():
    with pytest.raises(JobFileError, match=r"asks for 3 devices and this machine has 2: cpu:0-0, cpu:1-1; .*share:"):
        place({"generator": 2, "learner": 1}, CORES, {})


def test_busy_and_leased_devices_count_as_existing():
    devices = [gpu(0, busy_by="in use by process 7"), gpu(1)]
    assert isinstance(place({"generator": 2}, devices, {"GPU-1": "job 1"}), Wait)


def test_an_unusable_device_does_not_count_and_the_refusal_says_why():
    devices = [gpu(0), gpu(1, unusable="its memory can't be read: Not Supported")]
    with pytest.raises(JobFileError, match=r"this machine has 1: GPU-0; GPU-1 is unusable \(its memory can't be read"):
        place({"generator": 1, "learner": 1}, devices, {})


def test_a_machine_without_devices_refuses_everything():
    with pytest.raises(JobFileError, match="asks for 1 device and this machine has 0: none"):
        place({"generator": 1}, [], {})


@pytest.mark.parametrize(
    ("wants", "said"),
    [
        ({"generator": 1, "critic": 1}, r"resources\.critic is no role; the roles are generator, learner, scorer"),
        ({"generator": 1, "learner": "share:scorer"}, r'resources\.learner = "share:scorer" names no role of this job'),
        ({"generator": 1, "learner": "generator"}, r'resources\.learner = "generator" names no role'),
        ({"generator": 1, "learner": "share:learner"}, r"in a circle \(learner -> learner\)"),
        (
            {"generator": "share:learner", "learner": "share:generator"},
            "in a circle .generator -> learner -> generator",
        ),
        ({"generator": 0}, r"resources\.generator = 0 is no number of devices"),
        ({"generator": -1}, r"resources\.generator = -1 is no number of devices"),
    ],
)
def test_wants_that_make_no_sense_are_refused_by_name(wants, said):
    with pytest.raises(JobFileError, match=said):
        place(wants, CORES, {})


@given(
    machine=st.integers(1, 8),
    jobs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, "share:learner"])), max_size=6),
)
def test_leases_are_disjoint_until_the_machine_is_full(machine, jobs):
    devices = [gpu(number) for number in range(machine)]
    leased: dict[str, str] = {}
    for number, (generator, learner, scorer) in enumerate(jobs):
        wanted = generator + learner + (scorer if isinstance(scorer, int) else 0)
        wants = {"generator": generator, "learner": learner, "scorer": scorer}
        if wanted > machine:
            with pytest.raises(JobFileError):
                place(wants, devices, leased)
        elif wanted > machine - len(leased):
            assert all(held in reason(place(wants, devices, leased)) for held in leased)
        else:
            lease = place(wants, devices, leased)
            assert len(lease.ids) == wanted
            assert not set(lease.ids) & set(leased)
            leased |= dict.fromkeys(lease.ids, f"job {number}")
