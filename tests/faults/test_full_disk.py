"""A disk that fills up pauses a job and loses nothing; with room again it goes on. The disk is a small tmpfs.

The daemon mounts it in a mount namespace of its own, which needs no root where user namespaces are allowed; from
outside the files are reached through /proc/PID/root.
"""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copy

import pytest

from rlhfd.testing.nothing_lost import assert_nothing_lost
from tests.daemon import Daemon, write_job

DISK = "48m"
MOUNT_AND_RUN = 'mount -t tmpfs -o size="$1" tmpfs "$0" && shift && exec "$@"'

pytestmark = pytest.mark.root


def namespace() -> tuple[str, ...]:
    """How to get a mount namespace here."""
    for way in (("unshare", "-Urm"), ("unshare", "-m")):
        if subprocess.run([*way, "true"], capture_output=True, check=False).returncode == 0:
            return way
    pytest.skip("needs root or a user namespace")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("full")
    state = directory / "state"
    state.mkdir()
    prefix = (*namespace(), "sh", "-c", MOUNT_AND_RUN, str(state), DISK)
    with Daemon(state, socket=directory / "rlhfd.sock", prefix=prefix) as daemon:
        yield daemon


def disk(daemon: Daemon) -> Path:
    """The state directory as the daemon sees it."""
    return Path(f"/proc/{daemon.process.pid}/root{daemon.state_dir}")


def fill(daemon: Daemon) -> Path:
    """Write until nothing more fits."""
    filler = disk(daemon) / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    return filler


def test_a_full_disk_pauses_the_job_and_with_room_again_it_goes_on(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    job = write_job(
        tmp_path,
        tiny_model,
        job={"max_steps": 1000},
        checkpoint={"save_steps": 1000},
        generator={"engine_args": {"tokens_per_second": 100}},
    )
    job_id = daemon.submit(job)
    daemon.wait_event(job_id, "step")
    filler = fill(daemon)
    status = daemon.wait(job_id, {"paused", "failed", "done"})
    assert status["state"] == "paused", status
    assert "no room" in status["reason"]
    assert status["reason"].endswith(f"make room, then: rlhfd resume {job_id}")

    shown = daemon.cli("status", job_id)  # the full disk does not take the command line with it
    assert (shown.returncode, status["reason"] in shown.stdout) == (0, True), shown.stderr
    fill(daemon)  # what the pause has freed, too
    refused = daemon.cli("submit", job, "--set", "job.name=another")
    assert (refused.returncode, refused.stdout) == (74, "")
    assert refused.stderr.startswith("rlhfd: no room for the job in ")
    kept = status["step"]
    assert kept >= 1
    assert len(daemon.get(f"/v1/jobs/{job_id}/metrics")) == kept

    filler.unlink()
    after = daemon.events(job_id)[-1]["id"]
    assert daemon.cli("resume", job_id).returncode == 0
    daemon.wait_event(job_id, "step", after=after)
    assert daemon.status(job_id)["step"] > kept

    fill(daemon)
    assert daemon.wait(job_id, {"paused", "failed", "done"})["state"] == "paused"
    cancelled = daemon.cli("cancel", job_id)
    assert cancelled.returncode == 0, cancelled.stderr
    assert daemon.status(job_id)["state"] == "cancelled"
    for name in ("rlhfd.db", "rlhfd.db-wal"):  # nothing writes any more; SQLite can't open a file below /proc
        copy(disk(daemon) / name, tmp_path)
    assert_nothing_lost(tmp_path / "rlhfd.db", [])
    assert daemon.stop() == 0  # with the disk still full
