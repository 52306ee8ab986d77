"""What lies where, whose it is, and what a new epoch finds of the old one's."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfd.core.types import Epoch, JobId
from rlhfd.daemon import statedir as module
from rlhfd.daemon.logs import read_log, roles
from rlhfd.daemon.statedir import StateDir, make_private
from rlhfd.daemon.submit import _keep
from rlhfd.errors import AlreadyRunningError, StorageError, UsageError


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateDir]:
    (tmp_path / "shm").mkdir()
    (tmp_path / "runtime").mkdir()
    monkeypatch.setattr(module, "SHM", tmp_path / "shm")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    taken = StateDir.take(tmp_path / "s")
    yield taken
    taken.lock.close()


class TestTheLock:
    def test_keeps_a_second_daemon_out_until_the_first_is_gone(self, state):
        with pytest.raises(AlreadyRunningError, match="another rlhfd daemon uses"):
            StateDir.take(state.root)
        state.lock.close()
        StateDir.take(state.root).lock.close()

    def test_says_what_is_wrong_with_a_directory_that_can_not_be_made(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match=r"can't be used: (Not a directory|File exists); check its owner"):
            StateDir.take(tmp_path / "file")


def test_others_of_the_system_see_nothing_of_the_sockets(state):
    assert (state.root / "run").stat().st_mode & 0o777 == 0o700
    directory = state.root / "run" / "1"
    directory.mkdir(mode=0o755)
    make_private(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_run_directory_whose_path_is_too_long_for_a_socket_lies_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    deep = StateDir.take(tmp_path / ("ü" * 60))
    assert deep.run(JobId(3)).parent == tmp_path
    deep.lock.close()


def test_publications_go_into_memory_where_three_fit(state, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    assert state.weights(JobId(1), Epoch(2), 33).parent == module.SHM
    assert state.weights(JobId(1), Epoch(2), 34) == state.job(JobId(1)) / "weights"
    assert not state.weights(JobId(1), Epoch(2), 33).exists()


def test_a_new_epoch_clears_what_the_old_one_left_and_nothing_else(state, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    weights = state.weights(JobId(1), Epoch(1), 1)
    elsewhere = tmp_path / "runtime" / weights.name
    left = [weights, elsewhere, state.root / "run" / "1", state.root / "tmp" / "x", state.job(JobId(1)) / "weights"]
    kept = [module.SHM / "rlhfd-other-1-1", state.job(JobId(1)) / "checkpoints", state.prompts("a")]
    for directory in (*left, *kept):
        directory.mkdir(parents=True)
        (directory / "file").write_text("x")
    state.file(".upload-x").write_text("half")
    state.file("b" * 64).write_text("whole")
    state.clear_leftovers()
    assert [path for path in (*left, state.file(".upload-x")) if path.exists()] == []
    assert all(path.exists() for path in (*kept, state.file("b" * 64)))


class TestTheBallast:
    def usage(self, monkeypatch: pytest.MonkeyPatch, free: int, total: int = 16 * 4096) -> None:
        monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=total))

    def test_is_laid_once_and_dropped_once(self, state, monkeypatch):
        self.usage(monkeypatch, free=10**9)
        assert state.lay_ballast()
        assert (state.root / "ballast").stat().st_size == 4096
        assert state.lay_ballast()
        assert state.drop_ballast()
        assert not state.drop_ballast()

    def test_is_not_laid_into_the_last_room(self, state, monkeypatch):
        self.usage(monkeypatch, free=2 * 4096 - 1)
        assert not state.lay_ballast()
        assert not (state.root / "ballast").exists()

    def test_leaves_nothing_where_the_disk_refuses_it(self, state, monkeypatch):
        self.usage(monkeypatch, free=10**9)

        def full(*_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert not state.lay_ballast()
        assert not (state.root / "ballast").exists()


class TestASnapshot:
    def test_takes_its_place_under_its_hash(self, tmp_path):
        (tmp_path / "made").mkdir()
        _keep(tmp_path / "made", tmp_path / "kept")
        assert (tmp_path / "kept").is_dir()

    def test_that_another_submission_has_put_there_meanwhile_is_fine(self, tmp_path):
        for name in ("made", "kept"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "prompts.bin").write_text(name)
        _keep(tmp_path / "made", tmp_path / "kept")
        assert (tmp_path / "kept" / "prompts.bin").read_text() == "kept"

    def test_that_can_not_be_put_there_is_an_error(self, tmp_path):
        with pytest.raises(OSError, match="No such file"):
            _keep(tmp_path / "made", tmp_path / "kept")


class TestALog:
    @pytest.fixture
    def logs(self, tmp_path: Path) -> Path:
        for attempt, text in enumerate(("old\n", "new log\n"), 1):
            path = tmp_path / f"learner.{attempt}.log"
            path.write_text(text)
            os.utime(path, (attempt, attempt))
        return tmp_path

    def test_is_the_newest_attempts(self, logs):
        assert read_log(logs, "learner", 0) == {"text": "new log\n", "offset": 8, "files": ["learner"]}

    def test_is_read_on_from_an_offset_or_back_from_its_end(self, logs):
        assert read_log(logs, "learner", 4)["text"] == "log\n"
        assert read_log(logs, "learner", 99) == {"text": "", "offset": 8, "files": ["learner"]}
        assert read_log(logs, "learner", -4)["text"] == "log\n"
        assert read_log(logs, "learner", -99)["text"] == "new log\n"

    @pytest.mark.parametrize("name", ["generator", "../learner", "/etc/learner", "*", "", "**"])
    def test_of_another_name_is_refused(self, logs, name):
        with pytest.raises(UsageError, match="there are: learner"):
            read_log(logs, name, 0)

    def test_there_is_none_before_a_child_has_started(self, tmp_path):
        shutil.rmtree(tmp_path / "logs", ignore_errors=True)
        assert roles(tmp_path / "logs") == []
        with pytest.raises(UsageError, match="there are: none"):
            read_log(tmp_path / "logs", "learner", 0)
