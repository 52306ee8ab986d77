"""While a job has the devices: another waits and says for what, and the command line stays cheap."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import REPOSITORY, Daemon, write_job

CPU_SECONDS = 0.250
TRIES = 5


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("busy") / "state") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def running(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> int:
    """A job that has been generating for a while and will not come to an end."""
    job = write_job(
        tmp_path_factory.mktemp("slow"),
        tiny_model,
        job={"name": "slow", "max_steps": 1000},
        generator={"engine_args": {"tokens_per_second": 20}},
    )
    job_id = daemon.submit(job)
    daemon.wait_event(job_id, "generator_ready")
    return job_id


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one run of the command line, waited-for children included."""
    argv = [sys.executable, "-m", "rlhfd", *arguments]
    silent = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
    pid = os.posix_spawn(sys.executable, argv, {**os.environ, "PYTHONPATH": str(REPOSITORY)}, file_actions=silent)
    _, status, usage = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", [("status", "{job}"), ("status", "{job}", "--json"), ("--help",)])
def test_the_command_line_costs_little_while_a_job_runs(daemon: Daemon, running: int, command: tuple[str, ...]):
    arguments = ["--socket", str(daemon.socket), *(word.format(job=running) for word in command)]
    assert min(cpu_seconds(arguments) for _ in range(TRIES)) < CPU_SECONDS
    assert daemon.status(running)["state"] == "running"


def test_a_job_that_finds_the_devices_busy_waits_says_for_whom_and_starts_when_they_are_free(
    daemon: Daemon, running: int, tmp_path: Path, tiny_model: Path
):
    job_id = daemon.submit(write_job(tmp_path, tiny_model, job={"name": "second", "max_steps": 1}))
    reason = daemon.wait_event(job_id, "waiting")["reason"]
    first, second = daemon.status(running)["devices"]
    assert reason == f"needs 2 devices, free are 0 of 2; waits for {first} (job {running}), {second} (job {running})"
    shown = daemon.cli("status", job_id).stdout
    assert "second  queued" in shown
    assert reason in shown

    assert daemon.cli("pause", running).returncode == 0
    assert daemon.wait(job_id, {"done", "failed"})["state"] == "done"
    assert (daemon.status(running)["state"], daemon.status(running)["devices"]) == ("paused", [])

    refused = daemon.cli("pause", job_id)
    assert refused.returncode == 64
    assert refused.stderr == f"rlhfd: job {job_id}: a done job can't pause: only a queued or running one can\n"
