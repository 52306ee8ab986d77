"""check: what the job names is looked at for real, offline, and nothing is left behind."""

import json
import tempfile

import pytest

from rlhfd.__main__ import main
from rlhfd.cli import check as checking
from rlhfd.cli.submission import read
from tests.cli.conftest import write_job


@pytest.fixture
def job_file(tmp_path, tiny_model, monkeypatch):
    """A job on the tiny model; temporary directories are made where the test can see them."""
    path = write_job(tmp_path / "work")
    path.write_text(path.read_text().replace("smollm2-135m-instruct", str(tiny_model)))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return path


def test_a_good_job_tells_what_follows_and_leaves_nothing(job_file, capsys, tmp_path):
    assert main(["check", str(job_file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{job_file} is good\n")
    assert "2 layers, at most 1024 tokens" in out
    assert "1, " in out.partition("prompts")[2]
    assert "at most" in out.partition("tokens  ")[2]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_as_json_the_numbers_have_names(job_file, capsys):
    assert main(["check", str(job_file), "--json", "--set", "rollout.groups_per_step=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"name", "files", "model", "prompts", "estimate", "left_to_submit"}
    assert found["estimate"]["steps"] == 3
    assert found["estimate"]["prompts"] == 6
    assert found["prompts"]["rows"] == 1
    assert found["left_to_submit"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.prompt_column=question", "question"),
        ("rollout.groups_per_step=-1", "groups_per_step"),
        ("model.model_name_or_path=./nowhere", "nowhere"),
        ("reward.0.path=rewards.py:wrong", "wrong"),
    ],
)
def test_a_bad_job_is_one_sentence_and_78(job_file, capsys, tmp_path, change, words):
    assert main(["check", str(job_file), "--set", change]) == 78
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_the_hub_has_is_left_to_submit(job_file, capsys):
    sets = ["--set", "model.model_name_or_path=someone/something", "--set", "model.allow_download=true"]
    assert main(["check", str(job_file), *sets]) == 0
    assert "someone/something will be fetched and inspected at submit" in capsys.readouterr().out


def test_what_is_in_the_hubs_cache_is_looked_at(job_file, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    job = read(job_file, ["model.model_name_or_path=someone/something", "model.allow_download=true"]).config
    assert list(checking._left_to_submit(job)) == ["someone/something"]
    (tmp_path / "hub" / "models--someone--something" / "snapshots").mkdir(parents=True)
    assert list(checking._left_to_submit(job)) == []


def test_the_inspection_is_asked_to_stay_offline(job_file):
    job = read(job_file, ["model.allow_download=true"])
    assert checking._offline(job.spec)["model"]["allow_download"] is False
    assert job.spec["model"]["allow_download"] is True


def test_an_inspection_that_breaks_shows_its_last_words(job_file, capsys, monkeypatch):
    monkeypatch.setattr(checking.sys, "executable", "/bin/false")
    assert main(["check", str(job_file)]) == 78
    assert "ended with status 1" in capsys.readouterr().err
