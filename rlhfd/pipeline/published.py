"""What must be in a publication, read from its safetensors header alone (no torch here)."""

import json
from pathlib import Path
from struct import unpack

from rlhfd.errors import WeightSyncError

HEAD = "lm_head.weight"


def tensor_names(file: Path) -> set[str]:
    """Names of the tensors in one safetensors file."""
    with file.open("rb") as stream:
        (length,) = unpack("<Q", stream.read(8))
        return set(json.loads(stream.read(length))) - {"__metadata__"}


def assert_head(directory: Path) -> None:
    """A tied head must be written out: a reload from the embedding alone leaves the engine's packed head stale."""
    names = {name for file in directory.glob("*.safetensors") for name in tensor_names(file)}
    if HEAD not in names:
        raise WeightSyncError(f"the publication in {directory} has no {HEAD}: the generator would keep its old head")
