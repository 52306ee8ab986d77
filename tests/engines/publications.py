"""Directories of weights as a learner publishes them, made from the tiny model without torch."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rlhfd.testing.llama import EMBEDDING, HEAD, read_weights


def publish(model: Path, directory: Path, *, noise: float = 0.0, head: bool = True) -> Path:
    """The model's tensors with the head written out, each moved by `noise` of its own spread."""
    directory.mkdir()
    rng = np.random.default_rng(1)
    tensors = read_weights(model)
    moved = {
        name: (t + noise * t.std() * rng.standard_normal(t.shape)).astype(np.float32)
        for name, t in sorted(tensors.items())
    }
    moved[HEAD] = moved[EMBEDDING].copy()
    if not head:
        del moved[HEAD]
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(model / "config.json", directory)
    return directory
