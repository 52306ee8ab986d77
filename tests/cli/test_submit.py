"""submit: everything that the job needs goes with it, once."""

import hashlib
import json

import pytest

from rlhfd.api import peer
from rlhfd.cli import jobs
from rlhfd.errors import JobFileError
from tests.cli.conftest import write_job


async def test_submit_prints_the_id_alone(cli, service, job_file):
    outcome = await cli("submit", str(job_file))
    assert (outcome.status, outcome.out) == (0, "1\n")
    assert outcome.err == "job 1 (adder) is queued\n"


async def test_the_resolved_job_goes_with_its_files(cli, service, job_file):
    await cli("submit", str(job_file), "--set", "learner.learning_rate=3e-5", "--priority", "7", "--after", "4")
    body = service.submitted[0]
    assert body.spec["learner"]["learning_rate"] == 3e-5
    assert body.spec["rollout"]["max_staleness"] == 4  # a default, written out
    assert (body.priority, body.after, body.again) == (7, 4, False)
    assert set(body.files) == {"prompts.jsonl", "rewards.py"}
    for name, sha256 in body.files.items():
        data = (job_file.parent / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sha256
        assert (service.files / sha256).read_bytes() == data


async def test_a_file_that_is_there_is_not_sent_again(cli, service, job_file, monkeypatch):
    await cli("submit", str(job_file))
    monkeypatch.setattr("rlhfd.cli.client.Daemon.put_file", lambda *_: pytest.fail("sent again"))
    assert (await cli("submit", str(job_file))).status == 0


async def test_the_same_job_gives_the_same_id_and_says_how_it_stands(cli, service, job_file):
    await cli("submit", str(job_file))
    service.move(1, "failed", state="failed", reason="no room")
    outcome = await cli("submit", str(job_file))
    assert (outcome.status, outcome.out) == (0, "1\n")
    assert "is failed: no room; `rlhfd retry 1` tries again" in outcome.err


async def test_again_makes_a_new_one(cli, service, job_file):
    await cli("submit", str(job_file))
    assert (await cli("submit", str(job_file), "--again")).out == "2\n"


async def test_submit_as_json_is_the_status_alone(cli, service, job_file):
    outcome = await cli("submit", str(job_file), "--json")
    assert json.loads(outcome.out) == service.table[1] | {"created": True}
    assert outcome.err == ""


async def test_a_bad_job_file_is_78_before_anything_is_sent(cli, service, job_file):
    job_file.write_text(job_file.read_text() + "\n[rollout]\ngroups_per_stepp = 4\n")
    outcome = await cli("submit", str(job_file))
    assert (outcome.status, outcome.out) == (78, "")
    assert "groups_per_step" in outcome.err
    assert service.submitted == []
    assert list(service.files.iterdir()) == []


async def test_a_missing_job_file_is_78(cli, service, tmp_path):
    assert (await cli("submit", str(tmp_path / "none.toml"))).status == 78


async def test_a_missing_data_file_is_78(cli, service, job_file):
    (job_file.parent / "prompts.jsonl").unlink()
    outcome = await cli("submit", str(job_file))
    assert outcome.status == 78
    assert "prompts.jsonl" in outcome.err


async def test_what_the_daemon_refuses_is_told_with_its_status(cli, service, job_file):
    service.refusal = JobFileError("model x is unknown; name a directory")
    outcome = await cli("submit", str(job_file))
    assert (outcome.status, outcome.out, outcome.err) == (78, "", "rlhfd: model x is unknown; name a directory\n")


async def test_a_stranger_is_told_so_even_while_sending_a_large_file(cli, service, job_file, monkeypatch):
    monkeypatch.setattr(peer, "peer_of", lambda _: peer.Peer(pid=1, uid=54321, gids=frozenset(), socket_gid=None))
    (job_file.parent / "prompts.jsonl").write_bytes(b'{"prompt": "x"}\n' * 1_000_000)
    outcome = await cli("submit", str(job_file))
    assert outcome.status == 77
    assert "may not change anything here" in outcome.err


async def test_a_watched_job_gives_its_own_exit_status(cli, service, job_file, monkeypatch):
    submit = service.submit

    async def submit_and_fail(body):
        job = await submit(body)
        service.learn(job["id"], 0.5)
        service.move(job["id"], "failed", state="failed", reason="the engine died at start")
        return service.table[job["id"]] | {"created": True}

    monkeypatch.setattr(service, "submit", submit_and_fail)
    outcome = await cli("submit", str(job_file), "--watch")
    assert outcome.status == 1
    assert outcome.err.endswith("rlhfd: job 1 (adder) failed: the engine died at start\n")


@pytest.mark.parametrize(
    ("state", "created", "sentence"),
    [
        ("queued", True, "job 1 (a) is queued"),
        ("running", False, "job 1 (a) has the same content and is running"),
        ("done", False, "job 1 (a) has the same content and is done; --again makes a new one"),
    ],
)
def test_a_submission_is_told_in_one_sentence(state, created, sentence):
    assert jobs.told({"id": 1, "name": "a", "state": state, "reason": None, "created": created}) == sentence


async def test_two_jobs_of_other_content_get_two_ids(cli, service, tmp_path):
    assert (await cli("submit", str(write_job(tmp_path / "a", "one")))).out == "1\n"
    assert (await cli("submit", str(write_job(tmp_path / "b", "two")))).out == "2\n"
