"""kill -9 of the daemon alone, in each phase, with the real vLLM server: it costs time, never a token (issue's line 2).

One job is killed three times: in the middle of generating, of learning, of publishing. Started again with `serve` and
no other command it goes to its end, and everything acknowledged before is there.
"""

import json
import os
import select
import signal
import sqlite3
from pathlib import Path

import pytest

from rlhfd.testing.nothing_lost import assert_nothing_lost
from tests.daemon import Daemon, write_job

STEPS = 8
LENGTH = 192  # tokens: three rows; the made model has no end token
K = 4
GONE_WITHIN = 2.0  # seconds


def read(database: Path, sql: str, *values: object) -> list[sqlite3.Row]:
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.close()


def chunk_rows(database: Path) -> dict[tuple[int, int], tuple[int, bytes, bytes]]:
    rows = read(database, "SELECT rollout_id, start, version_id, tok, lp FROM chunk")
    return {(r["rollout_id"], r["start"]): (r["version_id"], r["tok"], r["lp"]) for r in rows}


def sessions_alive(sessions: set[int]) -> list[int]:
    """Processes of these sessions, whoever their parents are now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                session = os.getsid(int(entry.name))
            except ProcessLookupError:
                continue
            if session in sessions and entry.joinpath("cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """Those still there after so many seconds; waits on their pidfds."""
    left = []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([handle], [], [], seconds)
        os.close(handle)
        if not ready:
            left.append(pid)
    return left


class Killed:
    """What one death left behind."""

    def __init__(self, daemon: Daemon, database: Path) -> None:
        sessions = {row["session_id"] for row in read(database, "SELECT session_id FROM child")}
        assert sessions, "no child was running"
        self.left_over = wait_gone(sessions_alive(sessions), GONE_WITHIN)
        self.chunks = chunk_rows(database)
        self.applied = {
            r["n"]: (r["fingerprint"], r["id"])
            for r in read(database, "SELECT n, fingerprint, id FROM step WHERE state = 'applied'")
        }
        self.versions = {r["id"]: r["step"] for r in read(database, "SELECT id, step FROM policy_version")}
        self.partial = {
            r["id"]: r["n_tokens"]
            for r in read(database, "SELECT id, n_tokens FROM rollout WHERE state IN ('generating', 'partial')")
        }


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict:
    """The whole life of the job, once for all the tests of this file."""
    directory = tmp_path_factory.mktemp("kill")
    job = write_job(
        directory,
        tiny_model,
        job={"max_steps": STEPS, "seed": 3},
        rollout={
            "groups_per_step": 2,
            "num_generations": 4,
            "max_completion_length": LENGTH,
            "overcommit": 2,
            "max_staleness": K,
        },
        learner={"learning_rate": 1e-3, "tokens_per_micro_batch": 512},
        checkpoint={"save_steps": 3, "save_total_limit": 10},
    )
    state = directory / "state"
    database = state / "rlhfd.db"
    settings = {"generator_module": "vllm.entrypoints.openai.api_server", "retries": 10}
    deaths = []
    for number, crash_at in enumerate(["generate.row:6", "learn.progress:3", "publish.loaded:2"]):
        with Daemon(state, settings=settings, env={"RLHFD_CRASH_AT": crash_at}) as daemon:
            if number == 0:
                job_id = daemon.submit(job)
            assert daemon.wait_dead(300) == -signal.SIGKILL, f"{crash_at} was not reached"
            deaths.append(Killed(daemon, database))
    with Daemon(state, settings=settings) as daemon:
        status = daemon.wait(job_id, {"done", "failed"}, 300)
        samples = json.loads(daemon.cli("samples", str(job_id), "-n", "1000", "--json").stdout)
        audit = json.loads(daemon.cli("audit", str(job_id), "--json").stdout)
        events = daemon.events(job_id)
    return {
        "job": job_id,
        "database": database,
        "deaths": deaths,
        "status": status,
        "samples": samples,
        "audit": audit,
        "events": events,
    }


def test_the_job_is_done_after_exactly_its_steps(story):
    assert story["status"]["state"] == "done", story["status"]["reason"]
    steps = read(story["database"], "SELECT n, state FROM step ORDER BY n")
    assert [(r["n"], r["state"]) for r in steps] == [(n, "applied") for n in range(1, STEPS + 1)]


def test_the_first_death_was_in_the_middle_of_generating(story):
    assert any(tokens >= 64 for tokens in story["deaths"][0].partial.values())


def test_no_process_of_the_old_epoch_lives_two_seconds_later(story):
    assert [death.left_over for death in story["deaths"]] == [[], [], []]


def test_every_acknowledged_row_is_there_byte_for_byte(story):
    now = chunk_rows(story["database"])
    for death in story["deaths"]:
        assert death.chunks
        for key, row in death.chunks.items():
            assert now[key] == row


def test_versions_keep_their_steps(story):
    now = {r["id"]: r["step"] for r in read(story["database"], "SELECT id, step FROM policy_version")}
    for death in story["deaths"]:
        assert now | death.versions == now


def test_a_rollout_that_was_continued_across_a_kill_was_trained_with_two_versions(story):
    """And staleness and alpha of each of its tokens, as the learner used them, are what the tables say."""
    cut = set().union(*(death.partial for death in story["deaths"]))
    continued = [s for s in story["samples"] if s["rollout"] in cut and len(set(s["version_steps"])) >= 2]
    assert continued
    for sample in story["samples"]:
        rows = read(
            story["database"],
            "SELECT chunk.n, v.step FROM chunk JOIN policy_version AS v ON v.id = chunk.version_id "
            "WHERE rollout_id = ? ORDER BY start",
            sample["rollout"],
        )
        versions = [r["step"] for r in rows for _ in range(r["n"])]
        staleness = [max(sample["step"] - 1 - version, 0) for version in versions]
        assert sample["version_steps"] == versions
        assert sample["staleness"] == staleness
        assert max(staleness) <= K
        assert sample["alpha"] == pytest.approx([1.0 / d if d else 1.0 for d in staleness], abs=1e-7)


def test_replayed_steps_reproduced_their_fingerprints_bit_for_bit(story):
    kinds = [event["kind"] for event in story["events"]]
    assert "replayed" in kinds
    assert "replay_diverged" not in kinds
    now = {
        r["n"]: (r["fingerprint"], r["id"])
        for r in read(story["database"], "SELECT n, fingerprint, id FROM step WHERE state = 'applied'")
    }
    for death in story["deaths"]:
        assert now | death.applied == now


def test_every_ordinal_was_used_once(story):
    rows = read(story["database"], "SELECT ordinal, state FROM grp WHERE job_id = ? ORDER BY ordinal", story["job"])
    assert [r["ordinal"] for r in rows] == list(range(len(rows)))
    assert {r["state"] for r in rows} <= {"consumed", "dropped"}
    uses = read(story["database"], "SELECT grp_id, count(*) AS n FROM step_grp WHERE void = 0 GROUP BY grp_id")
    assert {r["n"] for r in uses} == {1}
    assert len(uses) == 2 * STEPS


def test_the_audit_derives_every_token_again_and_tells_neighbours_apart(story):
    audit = story["audit"]
    assert audit["not_rederivable"] == 0
    assert audit["mean_error"] < 1e-4
    assert audit["max_error"] < 1e-2
    assert audit["neighbour_mean_error"] > 10 * audit["mean_error"]
    assert audit["neighbour_mean_error"] > 1e-2


def test_nothing_acknowledged_is_lost(story):
    assert_nothing_lost(story["database"])
