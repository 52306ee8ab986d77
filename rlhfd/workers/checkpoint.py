"""Write and read checkpoints: safetensors and a manifest, no pickle; durable before anybody may refer to them.

    .tmp-<id>/ -> weights, optimiser, RNG (safetensors) -> manifest.json -> fsync each file -> fsync the directory
    -> rename to <id>/ -> fsync the parent -> (the daemon) COMMIT of the row

Weights are the trainable masters, float32: with an adapter, the adapter alone.
"""

import errno
import hashlib
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import safetensors
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from rlhfd.core import wire
from rlhfd.errors import BadCheckpointError, DiskFullError, StorageError
from rlhfd.workers.durable import replaced, sync_file

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
RNG = "rng.safetensors"
ROOM_FOR = 2  # this one, and the next, which is written before the oldest is deleted
HASH_BLOCK = 1 << 22  # bytes


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint; size in bytes, sha256 in hex."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is and what it must consist of. `step`: of the version, whose id is `version_id`."""

    version_id: int
    step: int
    epoch: int
    libraries: dict[str, str]
    files: list[ManifestFile]


def write(
    directory: Path,
    *,
    frame: wire.Checkpoint,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
) -> wire.Checkpointed:
    """Write the checkpoint and make it durable. Raises DiskFullError before or while writing, StorageError on EIO."""
    contents = {WEIGHTS: weights, OPTIMIZER: optimizer, RNG: rng_state()}
    need_room(directory, sum(t.nbytes for tensors in contents.values() for t in tensors.values()))
    with io_errors_named(directory), replaced(directory, durable=True) as temporary:
        for name, tensors in contents.items():
            save_file({k: t.detach().contiguous() for k, t in tensors.items()}, temporary / name)
        files = [describe(temporary / name) for name in contents]
        manifest = Manifest(
            version_id=frame.version_id, step=step, epoch=frame.epoch, libraries=library_versions(), files=files
        )
        encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        (temporary / MANIFEST).write_bytes(encoded)
        for name in (*contents, MANIFEST):
            sync_file(temporary / name)
    return wire.Checkpointed(
        manifest_sha=hashlib.sha256(encoded).hexdigest(), nbytes=sum(file.size for file in files) + len(encoded)
    )


def verify(directory: Path) -> Manifest:
    """The manifest, once every file agrees with it. Raises BadCheckpointError saying what does not."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        for file in manifest.files:
            if describe(directory / file.name) != file:
                raise BadCheckpointError(f"checkpoint {directory} is damaged: {file.name} is not what was written")
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError) as error:
        raise BadCheckpointError(f"checkpoint {directory} is incomplete: {error}") from error
    except OSError as error:
        raise StorageError(f"reading checkpoint {directory} failed: {error}") from error
    return manifest


@torch.no_grad()
def load_into(directory: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> Manifest:
    """Copy a verified checkpoint into these live tensors. Raises BadCheckpointError where it doesn't verify or fit."""
    manifest = verify(directory)
    for name, live in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
        stored = load_file(directory / name)
        if {k: t.shape for k, t in stored.items()} != {k: t.shape for k, t in live.items()}:
            raise BadCheckpointError(f"checkpoint {directory} does not fit the model: {name} has other tensors")
        for key, tensor in live.items():
            tensor.copy_(stored[key])
    restore_rng(load_file(directory / RNG))
    return manifest


def describe(path: Path) -> ManifestFile:
    """Size and hash of a file as it is now."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return ManifestFile(name=path.name, size=path.stat().st_size, sha256=digest.hexdigest())


def library_versions() -> dict[str, str]:
    """Of what wrote the files."""
    return {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }


def rng_state() -> dict[str, Tensor]:
    """The generators' states. A step draws nothing; whatever comes to draw must go on where it was."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Tensor]) -> None:
    """Put them back, as far as the device is there."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def need_room(directory: Path, nbytes: int) -> None:
    """Raises DiskFullError unless two of this size fit."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory.parent).free
    if free < ROOM_FOR * nbytes:
        raise DiskFullError(
            f"{directory.parent} has {free / 1e9:.1f} GB free and two checkpoints need "
            f"{ROOM_FOR * nbytes / 1e9:.1f} GB: make room, the job then goes on"
        )


@contextmanager
def io_errors_named(directory: Path) -> Generator[None]:
    """Turn what the disk answers into DiskFullError or StorageError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if _means_full(error):
            raise DiskFullError(f"no room left while writing {directory}: make room, the job then goes on") from error
        raise StorageError(f"writing {directory} failed: {error}") from error


def _means_full(error: OSError | SafetensorError) -> bool:
    numbers = {errno.ENOSPC, errno.EDQUOT}
    if isinstance(error, OSError):
        return error.errno in numbers
    return any(f"os error {number}" in str(error) for number in numbers)  # safetensors' own writer, in Rust
