"""What a user gets wrong, and what breaks around a job: one sentence, the exit status, and nothing else harmed."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest

from rlhfd.testing.nothing_lost import assert_nothing_lost
from tests.daemon import Daemon, write_job

USAGE, STATE_IN_USE, NO_DAEMON, BAD_JOB = 64, 75, 69, 78

FAULTY_REWARD = '''
import os, time

CLAIMS = {claims!r}


def first(kind, completion):
    """Whether this completion is the one that has claimed this kind of misbehaviour."""
    path = os.path.join(CLAIMS, kind)
    try:
        with open(path, "x") as claim:
            claim.write(repr(completion))
    except FileExistsError:
        pass
    return open(path).read() == repr(completion)


def faulty(completion, answer):
    """Of prompt 0 one completion each raises, hangs, gives NaN, gives text; of prompt 1 one raises."""
    for kind in {{"0": ["raise", "hang", "nan", "text"], "1": ["raise again"]}}.get(answer, []):
        if first(kind, completion):
            if kind.startswith("raise"):
                raise ValueError("boom")
            if kind == "hang":
                time.sleep(600)
            return float("nan") if kind == "nan" else "much"
    return 1.0
'''


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the file; a lost child is started again at once."""
    with Daemon(tmp_path_factory.mktemp("bad") / "state", settings={"restart_pause": 0.05}) as daemon:
        yield daemon


def refused(daemon: Daemon, job: Path, *flags: str) -> str:
    """The sentence with which `submit` refuses a job."""
    done = daemon.cli("submit", job, *flags)
    assert (done.returncode, done.stdout) == (BAD_JOB, ""), done.stderr
    assert done.stderr.startswith("rlhfd: ")
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


# --- the job file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rollout": {"num_generation": 4}}, "num_generation is no key of a job file: did you mean rollout.num_gen"),
        ({"rollout": {"num_generations": "four"}}, 'num_generations = "four" has the wrong type: give a whole number'),
        ({"rollout": {"groups_per_step": -1}}, "rollout.groups_per_step = -1 is too small: give at least 1"),
        ({"rollout": {"overcommit": "auto"}}, 'rollout.overcommit = "auto" comes with a later release: give a number'),
        ({"rollout": {"chunk_tokens": 32}}, "rollout.chunk_tokens comes with a later release"),
        ({"rollout": {"stream_scoring": True}}, "rollout.stream_scoring comes with a later release"),
        ({"resources": {"scorer": 1}}, "resources.scorer comes with a later release"),
        ({"rollout": {"top_p": 0.9}}, "rollout.top_p is refused: with it the recorded log-probs would not be those"),
        ({"rollout": {"top_k": 5}}, "rollout.top_k is refused: with it the recorded log-probs would not be those"),
        ({"generator": {"engine_args": {"seed": 3}}}, "generator.engine_args.seed is set by rlhfd"),
        ({"data": {"source": "jsonl:absent.jsonl"}}, "absent.jsonl, which is not there: correct the path"),
        ({"model": {"model_name_or_path": "./absent"}}, "absent, which is not there: correct the path"),
    ],
)
def test_a_mistake_in_the_job_file_is_named(daemon: Daemon, tmp_path: Path, tiny_model: Path, changes, sentence):
    assert sentence in refused(daemon, write_job(tmp_path, tiny_model, **changes))


def test_an_unknown_model_is_named_with_the_places_looked_at(daemon: Daemon, tmp_path: Path):
    sentence = refused(daemon, write_job(tmp_path, "nobody/nothing"))
    assert '"nobody/nothing" is neither a directory nor in the cache' in sentence


def test_more_devices_than_the_machine_has_are_refused(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    sentence = refused(daemon, write_job(tmp_path, tiny_model, resources={"generator": 700}))
    assert "(generator = 700, learner = 1) asks for 701 devices and this machine has 2: cpu:0-" in sentence


# --- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("", "jsonl:prompts.jsonl holds no rows: put at least one prompt into it"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', "prompts.jsonl row 2 has no column 'prompt': it has 'promt'"),
        ('{"prompt": "a"}\n{"prompt": "' + "long " * 300 + '"}\n', "prompts.jsonl row 2 has "),
    ],
)
def test_data_that_can_not_be_used_is_named_by_its_row(
    daemon: Daemon, tmp_path: Path, tiny_model: Path, rows, sentence
):
    job = write_job(tmp_path, tiny_model)
    (tmp_path / "prompts.jsonl").write_text(rows)
    assert sentence in refused(daemon, job)


def test_a_prompt_that_is_too_long_is_skipped_and_counted_where_the_job_says_so(
    daemon: Daemon, tmp_path: Path, tiny_model: Path
):
    job = write_job(tmp_path, tiny_model, data={"on_long_prompt": "skip"})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "' + "long " * 300 + '"}\n')
    done = daemon.cli("check", job, "--json")
    assert done.returncode == 0, done.stderr
    prompts = json.loads(done.stdout)["prompts"]
    assert (prompts["rows"], prompts["skipped"]) == (1, 1)


# --- models --------------------------------------------------------------------------------------------------------


def test_a_model_with_code_of_its_own_is_refused(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    model = copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    assert "auto_map" in refused(daemon, write_job(tmp_path, model))


def test_pickled_weights_are_refused(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    model = copytree(tiny_model, tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(daemon, write_job(tmp_path, model))


def test_a_model_whose_weights_are_cut_off_is_refused(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    model = copytree(tiny_model, tmp_path / "model")
    whole = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    (model / "model.safetensors").write_bytes(whole[: 8 + length // 2])
    assert "model.safetensors" in refused(daemon, write_job(tmp_path, model))


# --- rewards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def vowels(:\n", "rewards.py line 1 is no Python that can be read"),
        ("def consonants(completion): return 1.0\n", "rewards.py defines no function vowels"),
        ("import nowhere_to_be_found\ndef vowels(completion): return 1.0\n", "No module named 'nowhere_to_be_found'"),
    ],
)
def test_a_reward_file_that_does_not_import_is_refused(
    daemon: Daemon, tmp_path: Path, tiny_model: Path, code, sentence
):
    job = write_job(tmp_path, tiny_model)
    (tmp_path / "rewards.py").write_text(code)
    assert sentence in refused(daemon, job)


def test_a_reward_that_gives_no_number_leaves_its_rollout_out_and_is_never_a_zero(
    daemon: Daemon, tmp_path: Path, tiny_model: Path
):
    job = write_job(
        tmp_path,
        tiny_model,
        job={"name": "faulty", "max_steps": 1},
        data={"shuffle": False},
        reward=[{"type": "function", "path": "rewards.py:faulty", "timeout": 3.0}],
    )
    claims = tmp_path / "claims"
    claims.mkdir()
    (tmp_path / "rewards.py").write_text(FAULTY_REWARD.format(claims=str(claims)))
    job_id = daemon.submit(job)
    assert daemon.wait(job_id, {"done", "failed"})["state"] == "done"

    events = daemon.events(job_id)
    failed = [(e["ordinal"], e["error"]) for e in events if e["kind"] == "reward_failed"]
    told = sorted(error.partition(":")[0] for ordinal, error in failed if ordinal == 0)
    assert told == ["faulty (exception)", "faulty (not_finite)", "faulty (timeout)", "faulty (wrong_type)"]
    assert [error for ordinal, error in failed if ordinal == 1 and "boom" in error]
    (dropped,) = [e for e in events if e["kind"] == "group_dropped"]
    assert (dropped["ordinal"], dropped["reason"]) == (0, "only 0 of 4 rollouts have a reward")
    (step,) = daemon.get(f"/v1/jobs/{job_id}/metrics")
    assert (step["unscored_rollouts"], step["reward_mean"], step["dropped_groups"]) == (1, 1.0, 1)


def test_a_job_whose_every_reward_fails_does_not_spin_for_ever(daemon: Daemon, tmp_path: Path, tiny_model: Path):
    job = write_job(tmp_path, tiny_model, job={"name": "hopeless"}, rollout={"groups_per_step": 1, "overcommit": 0})
    (tmp_path / "rewards.py").write_text("def vowels(completion):\n    raise RuntimeError('no judge')\n")
    job_id = daemon.submit(job)
    status = daemon.wait(job_id, {"done", "failed"})
    assert status["state"] == "failed"
    assert status["reason"].startswith("2 groups in a row had fewer than 2 rollouts with a reward")
    assert "vowels (exception): " in status["reason"]
    assert "no judge" in status["reason"]


# --- engines -------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_at_its_start_fails_the_job_with_its_last_words(
    daemon: Daemon, tmp_path: Path, tiny_model: Path
):
    job = write_job(tmp_path, tiny_model, generator={"engine_args": {"fault": "die_at_start"}})
    job_id = daemon.submit(job)
    status = daemon.wait(job_id, {"done", "failed"})
    assert status["state"] == "failed"
    assert "the generator ended (exit status 1)" in status["reason"]
    assert "the engine was made to die at its start" in status["reason"]
    assert [e["losses"] for e in daemon.events(job_id) if e["kind"] == "generator_lost"] == [1, 2, 3, 4, 5]


def test_an_engine_that_dies_in_mid_run_is_replaced_and_partial_rollouts_go_on(
    daemon: Daemon, tmp_path: Path, tiny_model: Path
):
    length, k = 48, 4
    job = write_job(
        tmp_path,
        tiny_model,
        job={"max_steps": 1},
        rollout={"groups_per_step": 1, "num_generations": k, "overcommit": 0, "max_completion_length": length},
        generator={"engine_args": {"fault": f"die_after={k * length // 2}"}},
    )
    job_id = daemon.submit(job)
    status = daemon.wait(job_id, {"done", "failed"})
    assert status["state"] == "done", status
    lost = [event["why"] for event in daemon.events(job_id) if event["kind"] == "generator_lost"]
    assert lost
    assert all("the generator ended (SIGKILL)" in why for why in lost)
    trained = daemon.rows("SELECT n_tokens, resumes FROM rollout JOIN grp ON grp.id = grp_id WHERE job_id = ?", job_id)
    assert [row["n_tokens"] for row in trained] == [length] * k
    assert max(row["resumes"] for row in trained) >= 1
    assert_nothing_lost(daemon.state_dir / "rlhfd.db", [])


# --- ids, verbs, sockets, locks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", ["status", "pause", "resume", "cancel", "retry", "metrics", "samples", "events", "logs"]
)
def test_an_unknown_id_is_64(daemon: Daemon, verb: str):
    done = daemon.cli(verb, 999)
    assert (done.returncode, done.stderr) == (USAGE, "rlhfd: no job has the id 999\n")


def test_a_socket_that_another_daemon_answers_on_is_left_to_it(daemon: Daemon, tmp_path: Path):
    done = Daemon(tmp_path / "other", socket=daemon.socket).cli("serve")
    assert done.returncode == STATE_IN_USE
    assert str(daemon.socket) in done.stderr
    assert daemon.get("/v1/ping")["pid"] == daemon.process.pid


def test_a_state_directory_that_another_daemon_uses_is_left_to_it(daemon: Daemon, tmp_path: Path):
    done = Daemon(daemon.state_dir, socket=tmp_path / "other.sock").cli("serve")
    assert done.returncode == STATE_IN_USE
    assert f"another rlhfd daemon uses {daemon.state_dir}" in done.stderr
    assert daemon.get("/v1/ping")["pid"] == daemon.process.pid


def test_without_a_daemon_the_place_looked_at_is_named(tmp_path: Path):
    absent = Daemon(tmp_path / "state")
    done = absent.cli("status", 1)
    assert done.returncode == NO_DAEMON
    assert f"no daemon answers on {absent.socket}" in done.stderr
