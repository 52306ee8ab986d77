"""What the generator loads, the plain model's tensors in the serving dtype, and the reference to compare it with.

The head is written under its own name even where it is tied to the embedding: an engine that reloads a tied model from
the embedding alone may keep its packed copy of the head at the old weights without saying so.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.func import functional_call  # pyright: ignore[reportUnknownVariableType]

from rlhfd.errors import JobFileError
from rlhfd.workers.batch import Rollout, collate
from rlhfd.workers.checkpoint import io_errors_named
from rlhfd.workers.durable import replaced, sync_file
from rlhfd.workers.logprobs import token_scores
from rlhfd.workers.model import Inputs, Policy

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
NOISE_SHARE = 0.05  # of a tensor's own spread: 5 % moves a canary by ten times what a stale head would
TOKENS_PER_FORWARD = 8192  # padded tokens, where nobody placed the rollouts
NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf", ".safetensors.index.json")


@torch.no_grad()
def rounded(policy: Policy, dtype: torch.dtype, noise_seed: int | None = None) -> dict[str, Tensor]:
    """Copies on the CPU of every tensor of the plain model in `dtype`; the head of a tied model is its embedding.

    noise_seed: each tensor moved by noise of 5 % of its own spread, a function of seed and name alone.
    """
    aliases = {policy.head_name} if policy.tied else set[str]()
    tensors: dict[str, Tensor] = {}
    for name, master in policy.merged():
        if name not in aliases:
            moved = master if noise_seed is None else master + _noise(name, master, noise_seed)
            tensors[name] = (
                moved.to("cpu", dtype, copy=True) if moved.is_floating_point() else moved.to("cpu", copy=True)
            )
    return tensors


def _noise(name: str, tensor: Tensor, seed: int) -> Tensor:
    number = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float32)
    spread = float(tensor.float().std(correction=0)) or float(tensor.float().abs().mean()) or 1.0
    return drawn.to(tensor.device) * (NOISE_SHARE * spread)


def changed_share(now: Mapping[str, Tensor], before: Mapping[str, Tensor] | None) -> float:
    """Share of the elements whose bits differ; 1.0 where there is no before."""
    if before is None:
        return 1.0
    differing = sum(int((_bits(tensor) != _bits(before[name])).sum()) for name, tensor in now.items())
    return differing / sum(tensor.numel() for tensor in now.values())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def publish(directory: Path, policy: Policy, tensors: Mapping[str, Tensor], model_dir: Path) -> int:
    """Write a model directory for the engine, without tokenizer, under a temporary name first. Returns its bytes."""
    with_head = dict(tensors)
    if policy.tied:
        with_head[policy.head_name] = _tied_embedding(policy, tensors).clone()
    if policy.head_name not in with_head:
        raise AssertionError(f"the published tensors lack the head {policy.head_name}")
    with io_errors_named(directory), replaced(directory, durable=False) as temporary:
        save_file(with_head, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(_config(model_dir, policy.dtype))
        return sum(file.stat().st_size for file in temporary.iterdir())


def export(directory: Path, policy: Policy, model_dir: Path) -> None:
    """A plain Hugging Face directory: adapter merged, the start model's dtype and other files. Durable.

    Raises JobFileError for a directory that holds something already.
    """
    if directory.exists() and any(directory.iterdir()):
        raise JobFileError(f"{directory} is not empty: export to a new directory")
    dtype = _stored_dtype(model_dir)
    tensors = rounded(policy, dtype)
    with io_errors_named(directory), replaced(directory, durable=True) as temporary:
        for file in model_dir.iterdir():
            if file.is_file() and not file.name.endswith(NOT_COPIED):
                shutil.copyfile(file, temporary / file.name)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(_config(model_dir, dtype))
        for file in temporary.iterdir():
            sync_file(file)


def _config(model_dir: Path, dtype: torch.dtype) -> str:
    """The start model's configuration with the dtype of what is written."""
    config: dict[str, Any] = json.loads((model_dir / CONFIG).read_text())
    config.pop("torch_dtype", None)
    return json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"


def _stored_dtype(model_dir: Path) -> torch.dtype:
    config: dict[str, Any] = json.loads((model_dir / CONFIG).read_text())
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(named, torch.float32)


def _tied_embedding(policy: Policy, tensors: Mapping[str, Tensor]) -> Tensor:
    embedding = policy.causal.get_input_embeddings()
    name = next(n for n, module in policy.causal.named_modules() if module is embedding)
    return tensors[f"{name}.weight"]


class Reference:
    """Float32 compute on published, rounded tensors: what a faultless engine that loaded them would answer.

    It holds them in float32 on the policy's device while it lives; the masters are not touched.
    """

    def __init__(self, policy: Policy, tensors: Mapping[str, Tensor]) -> None:
        self._policy = policy
        prefix = policy.body_prefix
        self._tensors = {
            name: tensors[f"{prefix}{name}".replace(".base_layer", "")].to(policy.device, torch.float32)
            for name, _ in policy.body.named_parameters()
            if ".lora_" not in name
        }
        head = _tied_embedding(policy, tensors) if policy.tied else tensors[policy.head_name]
        self._head = head.to(policy.device, torch.float32)

    @torch.no_grad()
    def sequence(self, tokens: Tensor) -> Tensor:
        """Log-probs of tokens[1:] given what stands before each, float32 [len - 1], at temperature 1."""
        tokens = tokens.to(self._policy.device)
        length = len(tokens) - 1
        inputs = Inputs(
            ids=tokens[None, :-1],
            rows=torch.zeros(length, dtype=torch.long, device=tokens.device),
            columns=torch.arange(length, device=tokens.device),
            targets=tokens[1:],
        )
        return self._logps(inputs, temperature=1.0).cpu()

    @torch.no_grad()
    def completions(self, rollouts: Sequence[Rollout], temperature: float) -> dict[int, Tensor]:
        """Log-probs of each rollout's completion, float32 [T], by rollout id."""
        found = {rollout.id: torch.empty(0) for rollout in rollouts}
        for part in _packed([rollout for rollout in rollouts if len(rollout.tokens)]):
            batch = collate(part, self._policy.device)
            flat = self._logps(batch.inputs, temperature).cpu()
            found |= zip((r.id for r in part), torch.split(flat, [len(r.tokens) for r in part]), strict=True)
        return found

    def _logps(self, inputs: Inputs, temperature: float) -> Tensor:
        with self._policy.adapter_off():
            output = functional_call(
                self._policy.body, self._tensors, kwargs={"input_ids": inputs.ids, "use_cache": False}
            )
        hidden = output.last_hidden_state
        return token_scores(hidden[inputs.rows, inputs.columns], self._head, inputs.targets, temperature).logps


def _packed(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Cut into forwards of at most TOKENS_PER_FORWARD padded tokens, or one rollout."""
    parts: list[list[Rollout]] = []
    longest = 0
    for rollout in rollouts:
        length = len(rollout.prompt) + len(rollout.tokens)
        if parts and max(longest, length) * (len(parts[-1]) + 1) <= TOKENS_PER_FORWARD:
            longest = max(longest, length)
            parts[-1].append(rollout)
        else:
            longest = length
            parts.append([rollout])
    return parts
