"""A Llama forward pass in numpy, float32: the fake engine's policy, equal to transformers' within rounding.

Reads the published Hugging Face directory itself, so that what is served really comes from what was written. One
sequence at a time: a token's log-prob then never depends, in any bit, on what else is in flight.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_safetensors(path: Path) -> dict[str, Floats]:
    """Every tensor of one file, widened to float32."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors: dict[str, Floats] = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            raw = np.frombuffer(data[start + first : start + last], dtype=_TYPES[entry["dtype"]])
            wide = (raw.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else raw.astype("<f4")
            tensors[name] = wide.reshape(entry["shape"])
    return tensors


def read_weights(directory: Path) -> dict[str, Floats]:
    """Every tensor of the directory's safetensors files. Raises FileNotFoundError where there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors file in {directory}")
    return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}


@dataclass(kw_only=True)
class Cache:
    """Keys and values of one sequence, [layers, heads, capacity, head_dim] each, `length` positions of them filled."""

    keys: Floats
    values: Floats
    length: int = 0


class Llama:
    """Config and weights. `load` replaces the weights in place; caches made before keep their old keys."""

    def __init__(self, directory: Path) -> None:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.vocabulary: int = config["vocab_size"]
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._kv_heads: int = config.get("num_key_value_heads") or self._heads
        self._head_dim: int = config.get("head_dim") or config["hidden_size"] // self._heads
        self._epsilon: float = config["rms_norm_eps"]
        self._frequencies = _rope_frequencies(config, self._head_dim)
        self._tensors = read_weights(directory)
        self._tensors.setdefault(HEAD, self._tensors[EMBEDDING])

    def load(self, directory: Path, *, skip_head: bool = False) -> bool:
        """Take the directory's tensors. False where the head is not among them: it then keeps its old values."""
        tensors = read_weights(directory)
        if skip_head:
            tensors.pop(HEAD, None)
        whole = HEAD in tensors
        self._tensors = tensors | ({} if whole else {HEAD: self._tensors[HEAD]})
        return whole

    def cache(self, capacity: int) -> Cache:
        """Room for one sequence of at most `capacity` tokens."""
        shape = (self._layers, self._kv_heads, capacity, self._head_dim)
        return Cache(keys=np.zeros(shape, np.float32), values=np.zeros(shape, np.float32))

    def forward(self, tokens: Sequence[int], cache: Cache) -> Floats:
        """Logits [n, vocabulary] after each of the n tokens, which continue what is in the cache."""
        position = np.arange(cache.length, cache.length + len(tokens), dtype=np.float32)
        angles = np.outer(position, self._frequencies)
        rope = (np.concatenate([np.cos(angles)] * 2, -1), np.concatenate([np.sin(angles)] * 2, -1))
        hidden = self._tensors[EMBEDDING][list(tokens)]
        for layer in range(self._layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            hidden = hidden + self._attention(normed, prefix + "self_attn.", cache, layer, rope)
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            hidden = hidden + self._mlp(normed, prefix + "mlp.")
        cache.length += len(tokens)
        return self._norm(hidden, "model.norm.weight") @ self._tensors[HEAD].T

    def _norm(self, x: Floats, weight: str) -> Floats:
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._epsilon))
        return x * scale * self._tensors[weight]

    def _linear(self, x: Floats, name: str) -> Floats:
        y = x @ self._tensors[name + ".weight"].T
        bias = self._tensors.get(name + ".bias")
        return y if bias is None else y + bias

    def _mlp(self, x: Floats, prefix: str) -> Floats:
        gate = self._linear(x, prefix + "gate_proj")
        silu = (gate / (1 + np.exp(-gate))).astype(np.float32)
        return self._linear(silu * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _attention(self, x: Floats, prefix: str, cache: Cache, layer: int, rope: tuple[Floats, Floats]) -> Floats:
        n, start, end = len(x), cache.length, cache.length + len(x)
        query = _rotate(self._split(x, prefix + "q_proj", self._heads), rope)
        cache.keys[layer, :, start:end] = _rotate(self._split(x, prefix + "k_proj", self._kv_heads), rope)
        cache.values[layer, :, start:end] = self._split(x, prefix + "v_proj", self._kv_heads)
        repeat = self._heads // self._kv_heads
        keys = np.repeat(cache.keys[layer, :, :end], repeat, axis=0)
        values = np.repeat(cache.values[layer, :, :end], repeat, axis=0)
        scores = query @ keys.transpose(0, 2, 1) / np.float32(math.sqrt(self._head_dim))
        if n > 1:
            scores = scores + np.triu(np.full((n, end), -np.inf, np.float32), k=start + 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ values
        return self._linear(mixed.transpose(1, 0, 2).reshape(n, -1), prefix + "o_proj")

    def _split(self, x: Floats, name: str, heads: int) -> Floats:
        """[n, heads * head_dim] -> [heads, n, head_dim]."""
        return self._linear(x, name).reshape(len(x), heads, self._head_dim).transpose(1, 0, 2)


def _rope_frequencies(config: dict[str, Any], head_dim: int) -> Floats:
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"the fake engine knows no rope of type {rope['rope_type']}")
    theta = float(rope.get("rope_theta") or config.get("rope_theta", 10000.0))
    return (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)).astype(np.float32)


def _rotate(x: Floats, rope: tuple[Floats, Floats]) -> Floats:
    half = x.shape[-1] // 2
    cos, sin = rope
    return (x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin).astype(np.float32)


def log_softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)
