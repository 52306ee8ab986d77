"""run: with a live daemon or its own, to the end or to Ctrl-C."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfd.api import create_app, serve_api
from rlhfd.cli import follow as following
from rlhfd.cli.client import Daemon
from rlhfd.cli.own import OwnDaemon
from rlhfd.cli.run import the_line_that_goes_on
from rlhfd.errors import NoDaemonError
from tests.cli.conftest import write_job
from tests.fake_service import FakeService, metric

ROOT = Path(__file__).parents[2]
WITH_FAKE = (
    "import sys; from rlhfd.cli import own; from rlhfd.__main__ import main; "
    "own.PROGRAM = (sys.executable, '-m', {module!r}); sys.exit(main())"
)


def started(*argv: str, module: str = "tests.fake_daemon") -> subprocess.Popen[str]:
    """`rlhfd …` whose own daemon is the fake one."""
    return subprocess.Popen(
        [sys.executable, "-c", WITH_FAKE.format(module=module), *argv],
        cwd=ROOT,
        env={**os.environ, "HOME": "/nonexistent"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C of the tests must not reach it by itself
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def until(process: subprocess.Popen[str], word: str) -> str:
    """Read stderr up to a line with `word`."""
    read = ""
    while word not in read:
        line = process.stderr.readline()
        assert line, f"it ended before it said {word!r}: {read}"
        read += line
    return read


# --- a daemon of its own ----------------------------------------------------------------------------------------------


def test_run_starts_a_daemon_follows_to_the_end_and_stops_it(tmp_path):
    status, out, err = ended(started("run", str(write_job(tmp_path / "w")), "--state-dir", str(tmp_path / "st")))
    assert status == 0, err
    assert "step 3/3  reward 0.600  400 tokens/s  0:00 left" in err
    assert out.splitlines()[0].startswith("STEP")
    assert "┤" in out
    assert "job 1 (adder) is done after step 3 of 3" in out
    assert (tmp_path / "st" / "drained").exists()
    assert not (tmp_path / "st" / "rlhfd.sock").exists()


def test_run_as_json_prints_metrics_and_then_the_status(tmp_path):
    line = ("run", str(write_job(tmp_path / "w")), "--state-dir", str(tmp_path / "st"), "--json")
    _, out, _ = ended(started(*line))
    objects = [json.loads(text) for text in out.splitlines()]
    assert objects[:3] == [metric(1, 0.1), metric(2, 0.2), metric(3, 0.6)]
    assert (objects[3]["state"], objects[3]["step"]) == ("done", 3)
    assert len(objects) == 4


def test_a_failed_job_gives_its_reason_and_1_and_the_daemon_is_stopped(tmp_path):
    job = write_job(tmp_path / "w", "bad")
    status, _, err = ended(started("run", str(job), "--state-dir", str(tmp_path / "st")))
    assert status == 1
    assert err.endswith("rlhfd: job 1 (bad) failed: the engine died at start: no room\n")
    assert (tmp_path / "st" / "drained").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_drains_the_own_daemon_and_prints_the_line_that_goes_on(tmp_path, number):
    job = write_job(tmp_path / "w", "slow")
    line = ("run", str(job), "--state-dir", str(tmp_path / "st"))
    process = started(*line)
    until(process, "step 1/3")
    process.send_signal(number)
    status, _, err = ended(process)
    assert status == 130
    assert f"go on with:  rlhfd run {job} --state-dir {tmp_path}/st\n" in err
    assert (tmp_path / "st" / "drained").exists()


def test_a_daemon_that_does_not_start_shows_the_end_of_its_log(tmp_path):
    job = write_job(tmp_path / "w")
    status, _, err = ended(started("run", str(job), "--state-dir", str(tmp_path / "st"), module="no_such_module"))
    assert status == 1
    assert "the daemon ended with status 1: it said" in err
    assert "No module named no_such_module" in err


async def test_a_daemon_that_lost_the_race_for_the_state_directory_leads_to_the_winner(tmp_path, socket_path):
    program = subprocess.Popen([sys.executable, "-c", "raise SystemExit(75)"])
    await asyncio.to_thread(program.wait, 60)
    loser = OwnDaemon(process=program, socket=socket_path, log=io.BytesIO())
    waiting = asyncio.create_task(asyncio.to_thread(loser.wait_ready))
    async with serve_api(create_app(FakeService(tmp_path)), socket_path):
        winner = await asyncio.wait_for(waiting, 30)
        assert (await asyncio.to_thread(winner.get, "/ping"))["pid"] == 4242
    assert loser.lost_the_race


def test_a_bad_job_file_starts_no_daemon(tmp_path):
    job = write_job(tmp_path / "w")
    job.write_text("[job]\n")
    status, _, _ = ended(started("run", str(job), "--state-dir", str(tmp_path / "st")))
    assert status == 78
    assert not (tmp_path / "st").exists()


def test_again_is_not_in_the_line_that_goes_on():
    assert the_line_that_goes_on(["run", "my job.toml", "--again"]) == "rlhfd run 'my job.toml'"


# --- a live daemon ----------------------------------------------------------------------------------------------------


async def test_with_a_live_daemon_the_job_is_followed_there(cli, service, job_file):
    running = asyncio.create_task(cli("run", str(job_file)))
    await asyncio.wait_for(service.waiting.wait(), 30)
    service.learn(1, 0.1, 0.2)
    service.move(1, "done", state="done", step=2)
    outcome = await running
    assert outcome.status == 0
    assert "is done after step 2 of 3" in outcome.out
    assert (await cli("ls")).status == 0  # it is still there


async def test_a_failed_job_is_tried_again_and_a_paused_one_resumed(cli, service, job_file):
    await cli("submit", str(job_file))
    for state, event in (("failed", "retry"), ("paused", "resume")):
        service.move(1, "stopped", state=state, reason="no room")
        service.waiting.clear()
        running = asyncio.create_task(cli("run", str(job_file)))
        await asyncio.wait_for(service.waiting.wait(), 30)
        assert service.log[1][-1]["kind"] == event
        service.move(1, "done", state="done")
        assert (await running).status == 0


async def test_a_job_that_is_done_is_shown_at_once(cli, service, job_file):
    await cli("submit", str(job_file))
    service.learn(1, 0.5)
    service.move(1, "done", state="done")
    outcome = await cli("run", str(job_file))
    assert (outcome.status, len(service.table)) == (0, 1)
    assert "--again makes a new one" in outcome.err


async def test_a_cancelled_job_is_1(cli, service, job_file):
    await cli("submit", str(job_file))
    service.move(1, "cancelled", state="cancelled", reason="cancelled by its owner")
    outcome = await cli("run", str(job_file))
    assert outcome.status == 1
    assert "rlhfd: job 1 (adder) was cancelled: cancelled by its owner" in outcome.err


async def test_ctrl_c_leaves_a_live_daemons_job_alone(service, socket_path, tmp_path):
    process = started("--socket", str(socket_path), "run", str(write_job(tmp_path / "w")))
    await asyncio.wait_for(service.waiting.wait(), 30)
    process.send_signal(signal.SIGINT)
    status, _, err = await asyncio.to_thread(ended, process)
    assert status == 130
    assert "no longer following; job 1 goes on" in err
    assert service.table[1]["state"] == "queued"


# --- following --------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.steps, self.events, self.closed = [], [], False

    def update(self, _job, events, steps):
        self.events += [e["kind"] for e in events]
        self.steps += [s["step"] for s in steps]


async def test_each_step_and_event_is_shown_once(service, socket_path):
    job = service.add("adder", "running")
    view = Recorder()
    service.learn(job, 0.1)
    running = asyncio.create_task(asyncio.to_thread(following.follow, Daemon(socket_path), job, view))
    await asyncio.wait_for(service.waiting.wait(), 30)
    service.learn(job, 0.2)
    service.learn(job, 0.3)
    service.move(job, "done", state="done")
    ended_job, steps = await asyncio.wait_for(running, 30)
    assert view.steps == [s["step"] for s in steps] == [1, 2, 3]
    assert view.events == ["step", "step", "step", "done"]
    assert ended_job["state"] == "done"


class Restarting:
    """A daemon that is away for the first calls; `clock` jumps by what is slept."""

    def __init__(self, monkeypatch, away: int) -> None:
        self.now, self.away = 0.0, away
        monkeypatch.setattr(following.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(following.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def get(self, path, **_):
        if self.away > 0:
            self.away -= 1
            raise NoDaemonError("away")
        return [] if path.endswith(("events", "metrics")) else {"state": "done"}


def test_a_daemon_that_restarts_is_waited_for(monkeypatch):
    daemon = Restarting(monkeypatch, away=100)
    assert following.follow(daemon, 1, Recorder())[0]["state"] == "done"


def test_a_daemon_that_stays_away_is_an_error(monkeypatch):
    daemon = Restarting(monkeypatch, away=10**9)
    with pytest.raises(NoDaemonError):
        following.follow(daemon, 1, Recorder())
    assert following.PATIENCE_SECONDS <= daemon.now < following.PATIENCE_SECONDS + 2


def test_a_daemon_of_ours_that_is_dead_is_not_waited_for(monkeypatch):
    daemon = Restarting(monkeypatch, away=10**9)

    def dead():
        raise NoDaemonError("it ended with status 9")

    with pytest.raises(NoDaemonError, match="status 9"):
        following.follow(daemon, 1, Recorder(), check=dead)
    assert daemon.now == 0
