"""Data sets of the Hugging Face library: saved ones, directories of files, and the hub behind two locks."""

import json
from pathlib import Path

import datasets
import pytest

from rlhfd.config import parse_job
from rlhfd.errors import JobFileError
from rlhfd.workers import data
from rlhfd.workers.model_directory import Permissions

ROWS = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(5)]


def rows_of(tmp_path: Path, target: str, *, download: bool = False, **of_data):
    job = parse_job(
        {
            "model": {"model_name_or_path": "tiny"},
            "data": {"source": f"hf:{target}", **of_data},
            "reward": [{"type": "math"}],
        }
    )
    allowed = Permissions(download=download, remote_code=False)
    return list(data.rows(job, data.Library(files={}, allowed=allowed, cache_dir=tmp_path / "cache")))


@pytest.fixture
def saved(tmp_path):
    """A data set with one split, saved to disk."""
    directory = tmp_path / "saved"
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk(directory)
    return directory


def test_a_saved_data_set_is_read_by_its_split(tmp_path, saved):
    rows = rows_of(tmp_path, str(saved), split="test")
    assert [row.prompt for row in rows] == [row["prompt"] for row in ROWS]
    assert (rows[4].where, rows[4].columns) == ("saved row 5", {"answer": "5"})


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path, saved):
    with pytest.raises(JobFileError, match=r'data\.split = "train" is not in .*: it has test'):
        rows_of(tmp_path, str(saved))


def test_a_directory_of_files_is_read(tmp_path):
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert [row.columns["answer"] for row in rows_of(tmp_path, str(directory))] == ["1", "2", "3", "4", "5"]


def test_a_directory_without_data_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobFileError, match="can't be loaded"):
        rows_of(tmp_path, str(tmp_path / "empty"))


def test_the_hub_is_not_asked_unless_job_and_settings_allow_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "none"))
    with pytest.raises(JobFileError, match=r"set data\.allow_download = true"):
        rows_of(tmp_path, "rlhfd-tests/no-such-data")
    with pytest.raises(JobFileError, match="not allowed by this daemon's settings"):
        rows_of(tmp_path, "rlhfd-tests/no-such-data", allow_download=True)
