"""Checkpoints: everything comes back bit for bit, damage is seen, and nothing has its name before it is durable."""

import errno
import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from rlhfd.core import wire
from rlhfd.errors import BadCheckpointError, DiskFullError, StorageError
from rlhfd.workers import checkpoint
from rlhfd.workers.optimizer import checksum
from tests.workers.steps import learn, make_rollouts, session_of

LORA = {"use_peft": True, "lora_r": 4}
FILES = {"manifest.json", "weights.safetensors", "optimizer.safetensors", "rng.safetensors"}


def save(session, directory, version_id=12, epoch=5):
    return session.checkpoint(wire.Checkpoint(dir=str(directory), version_id=version_id, epoch=epoch))


def trained(model, **settings):
    session = session_of(model, **settings)
    learn(session, make_rollouts(session.policy, version=0))
    return session


@pytest.fixture
def saved(tiny_model, tmp_path):
    save(trained(tiny_model), tmp_path / "12")
    return tmp_path / "12"


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_weights_moments_and_step_come_back_bit_for_bit(tiny_model, tmp_path, settings):
    session = trained(tiny_model, **settings)
    save(session, tmp_path / "12")
    back = session_of(tiny_model, tmp_path / "12", **settings)
    assert back.loaded().step == 1
    assert checksum(back.policy.trainable()) == checksum(session.policy.trainable())
    assert checksum(back.optimizer.state()) == checksum(session.optimizer.state())


def test_the_random_generator_goes_on_where_it_was(tiny_model, tmp_path):
    save(session_of(tiny_model), tmp_path / "12")
    expected = torch.rand(3)
    session_of(tiny_model, tmp_path / "12", seed=99)
    assert torch.equal(torch.rand(3), expected)


def test_the_manifest_describes_every_file_and_is_what_was_answered(tiny_model, tmp_path):
    answer = save(trained(tiny_model), tmp_path / "12")
    manifest = checkpoint.verify(tmp_path / "12")
    assert (manifest.version_id, manifest.step, manifest.epoch) == (12, 1, 5)
    assert {"torch", "transformers", "safetensors"} <= manifest.libraries.keys()
    assert (
        {f.name for f in manifest.files} | {"manifest.json"} == FILES == {f.name for f in (tmp_path / "12").iterdir()}
    )
    for file in manifest.files:
        data = (tmp_path / "12" / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    encoded = (tmp_path / "12" / "manifest.json").read_bytes()
    assert answer.manifest_sha == hashlib.sha256(encoded).hexdigest()
    assert answer.nbytes == sum(f.stat().st_size for f in (tmp_path / "12").iterdir())


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit in the weights": lambda d: flip_a_bit(d / "weights.safetensors"),
    "a flipped bit in the moments": lambda d: flip_a_bit(d / "optimizer.safetensors"),
    "a short file": lambda d: os.truncate(d / "weights.safetensors", 1000),
    "a missing file": lambda d: (d / "optimizer.safetensors").unlink(),
    "a missing manifest": lambda d: (d / "manifest.json").unlink(),
    "half a manifest": lambda d: os.truncate(d / "manifest.json", 100),
    "a manifest of something else": lambda d: (d / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen_before_anything_is_loaded(saved, tiny_model, damage):
    DAMAGE[damage](saved)
    with pytest.raises(BadCheckpointError, match="checkpoint"):
        checkpoint.verify(saved)
    with pytest.raises(BadCheckpointError):
        session_of(tiny_model, saved)


def test_a_checkpoint_that_is_not_there_is_a_bad_one(tmp_path):
    with pytest.raises(BadCheckpointError, match="incomplete"):
        checkpoint.verify(tmp_path / "nothing")


def test_a_checkpoint_of_another_model_does_not_fit(tiny_model, tmp_path):
    save(trained(tiny_model, **LORA), tmp_path / "12")
    with pytest.raises(BadCheckpointError, match="does not fit"):
        session_of(tiny_model, tmp_path / "12")


def test_a_failing_disk_is_no_bad_checkpoint(saved, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "describe", fail)
    with pytest.raises(StorageError):
        checkpoint.verify(saved)


def test_files_are_synced_before_their_directory_before_the_rename_before_the_parent(tiny_model, tmp_path, monkeypatch):
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(fd):
        done.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        fsync(fd)

    def recorded_rename(self, target):
        done.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    session = trained(tiny_model)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    save(session, tmp_path / "checkpoints" / "12")
    assert set(done[:4]) == {f"fsync {name}" for name in FILES}
    assert done[4:] == ["fsync .tmp-12", "rename .tmp-12 12", "fsync checkpoints"]


def test_what_a_crash_left_half_written_is_written_anew(tiny_model, tmp_path):
    for name in (".tmp-12", "12"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "leftover").write_text("of a life before")
    save(trained(tiny_model), tmp_path / "12")
    assert [f.name for f in tmp_path.iterdir()] == ["12"]
    assert {f.name for f in (tmp_path / "12").iterdir()} == FILES


def test_without_room_for_two_nothing_is_written(tiny_model, tmp_path, monkeypatch):
    session = trained(tiny_model)
    size = sum(t.nbytes for t in (*session.policy.trainable().values(), *session.optimizer.state().values()))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(1.9 * size)))
    with pytest.raises(DiskFullError, match="make room"):
        save(session, tmp_path / "12")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), DiskFullError),
        (OSError(errno.EIO, "Input/output error"), StorageError),
        (SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)"), StorageError),
    ],
)
def test_an_error_while_writing_leaves_no_directory_and_an_intact_learner(
    tiny_model, tmp_path, monkeypatch, error, raised
):
    session = trained(tiny_model)

    def fail(*_args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        with pytest.raises(StorageError) as caught:
            save(session, tmp_path / "12")
    assert type(caught.value) is raised
    assert list(tmp_path.iterdir()) == []
    save(session, tmp_path / "12")
    assert json.loads((tmp_path / "12" / "manifest.json").read_text())["step"] == 1
