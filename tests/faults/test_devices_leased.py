"""On a recorded machine of eight GPUs jobs get disjoint sets of them, and one that finds too few waits and says why.

Numbers 2 and 5 are in use by others, 7 has no readable memory: 0, 1, 3, 4 and 6 are to be had.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfd.core import procfs
from rlhfd.devices import RECORDING
from rlhfd.testing.inventory import EIGHT_GPUS, record, uuid_of
from tests.daemon import Daemon, write_job

GATED_REWARD = """
import os, time


def vowels(completion):
    while not os.path.exists({gate!r}):
        time.sleep(0.02)
    return float(len(completion))
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    record(EIGHT_GPUS, tmp_path / "nvml.json")
    with Daemon(tmp_path / "state", env={RECORDING: str(tmp_path / "nvml.json")}) as daemon:
        yield daemon


def gated_job(directory: Path, model: Path, *, generators: int) -> tuple[Path, Path]:
    """A job of one step that scores nothing until the gate, a file, is there."""
    name, gate = directory.name, directory / "gate"
    job = write_job(
        directory,
        model,
        job={"name": name, "max_steps": 1},
        reward=[{"type": "function", "path": "rewards.py:vowels", "timeout": 250.0}],
        resources={"generator": generators, "learner": 1},
    )
    (directory / "rewards.py").write_text(GATED_REWARD.format(gate=str(gate)))
    return job, gate


def gpus_of(daemon: Daemon, job_id: int) -> dict[str, set[str]]:
    """role -> UUIDs that the role's processes see, from the environment of each of them."""
    return {
        row["role"]: {uuid for pid in (row["pid"], *(p.pid for p in procfs.tree(row["pid"]))) for uuid in visible(pid)}
        for row in daemon.rows("SELECT role, pid FROM child WHERE job_id = ?", job_id)
    }


def visible(pid: int) -> set[str]:
    """CUDA_VISIBLE_DEVICES of a process."""
    variables = dict(entry.split(b"=", 1) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if entry)
    return set(filter(None, variables[b"CUDA_VISIBLE_DEVICES"].decode().split(",")))


def test_jobs_hold_disjoint_gpus_and_the_next_one_waits_for_them(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    wide_job, wide_gate = gated_job(tmp_path / "wide", tiny_model, generators=2)
    narrow_job, narrow_gate = gated_job(tmp_path / "narrow", tiny_model, generators=1)
    late_job, late_gate = gated_job(tmp_path / "late", tiny_model, generators=1)
    wide, narrow = daemon.submit(wide_job), daemon.submit(narrow_job)
    for job_id in (wide, narrow):
        daemon.wait_event(job_id, "generator_ready")

    held = {job_id: gpus_of(daemon, job_id) for job_id in (wide, narrow)}
    assert held[wide]["generator"] == {uuid_of(0), uuid_of(1)}
    assert held[wide]["learner"] == {uuid_of(3)}
    assert held[narrow]["generator"] == {uuid_of(4)}
    assert held[narrow]["learner"] == {uuid_of(6)}
    assert held[wide]["rewards"] == held[narrow]["rewards"] == set()
    assert set(daemon.status(narrow)["devices"]) == {uuid_of(4), uuid_of(6)}

    late = daemon.submit(late_job)
    waits = daemon.wait_event(late, "waiting")["reason"]
    assert waits.startswith("needs 2 devices, free are 0 of 7; waits for ")
    assert f"{uuid_of(4)} (job {narrow})" in waits
    assert f"{uuid_of(2)} (in use by process 900001 holding 30.0 GiB)" in waits
    assert uuid_of(7) not in waits
    status = daemon.status(late)
    assert (status["state"], status["reason"], status["devices"]) == ("queued", waits, [])

    narrow_gate.touch()
    assert daemon.wait(narrow, {"done", "failed"})["state"] == "done"
    daemon.wait_event(late, "generator_ready")
    assert gpus_of(daemon, late)["generator"] == {uuid_of(4)}
    for gate in (wide_gate, late_gate):
        gate.touch()
    assert [daemon.wait(job_id, {"done", "failed"})["state"] for job_id in (wide, late)] == ["done", "done"]


def test_more_gpus_than_the_machine_can_ever_give_are_refused(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    job, _ = gated_job(tmp_path / "greedy", tiny_model, generators=7)
    done = daemon.cli("submit", job)
    assert done.returncode == 78
    assert "asks for 8 devices and this machine has 7" in done.stderr
    assert f"{uuid_of(7)} is unusable (its memory can't be read: Not Supported)" in done.stderr
