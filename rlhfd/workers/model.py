"""The policy in memory: float32 masters, an optional LoRA adapter, and log-probs of completions.

`causal` is the transformers model with peft's layers injected in place, so its body and head can be called apart: the
body under autocast, the head in float32 and only where a completion token is predicted.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rlhfd.core import wire
from rlhfd.errors import JobFileError
from rlhfd.workers.logprobs import TokenScores, token_scores
from rlhfd.workers.numerics import ATTENTION, body_dtype

ADAPTER = "default"
BASE_LAYER = ".base_layer"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
HEAD_TOLERANCE = 1e-3  # float32, logits of order 10


class _CausalLM(Protocol):
    """What is used of a transformers model; its own types are mostly unknown."""

    def __call__(self, *, input_ids: Tensor, use_cache: bool) -> Any: ...
    def get_decoder(self) -> nn.Module: ...
    def get_input_embeddings(self) -> nn.Embedding: ...
    def get_output_embeddings(self) -> nn.Linear: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...
    def requires_grad_(self, requires_grad: bool) -> Any: ...
    def gradient_checkpointing_enable(self, *, gradient_checkpointing_kwargs: Mapping[str, bool]) -> None: ...
    def to(self, device: torch.device) -> Any: ...
    def train(self) -> Any: ...


class _LowRank(Protocol):
    """What is used of a layer that peft wrapped."""

    def get_delta_weight(self, adapter: str) -> Tensor: ...
    def enable_adapters(self, enabled: bool) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Token ids [B, L] right-padded, and where completion tokens are predicted, flat in order of (row, t).

    rows, columns, targets: int64 [n]; completion token t of a row with a prompt of P tokens is predicted at P + t - 1.
    No attention mask: padding stands right of everything that is read, and attention is causal.
    """

    ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor


class Policy:
    """The model that is trained. Masters are float32; `dtype` is what is served, `compute` the body's, by autocast."""

    def __init__(self, causal: _CausalLM, settings: wire.LearnerSettings, device: torch.device) -> None:
        self.causal = causal
        self.device = device
        self.dtype = DTYPES[settings.dtype]
        self.compute = body_dtype(settings, device)

    @property
    def body(self) -> nn.Module:
        """All but the head: ids to hidden states."""
        return self.causal.get_decoder()

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        return self.causal.get_output_embeddings().weight

    @property
    def head_name(self) -> str:
        """The head's name in a checkpoint, also where it is tied to the embedding."""
        module = self.causal.get_output_embeddings()
        return next(f"{name}.weight" for name, candidate in self.causal.named_modules() if candidate is module)

    @property
    def tied(self) -> bool:
        """The head is the input embedding."""
        return self.causal.get_input_embeddings().weight is self.head

    @property
    def body_prefix(self) -> str:
        """What stands before the names of the body's tensors."""
        body = self.body
        return next(f"{name}." for name, candidate in self.causal.named_modules() if candidate is body)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name, in the model's order."""
        return {name: p for name, p in self.causal.named_parameters() if p.requires_grad}

    def scores(self, inputs: Inputs, temperature: float) -> TokenScores:
        """Log-probs (with gradient) and entropies of the targets, float32 [n]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute is torch.bfloat16):
            hidden = hidden_states(self.body, inputs.ids)
        return token_scores(hidden[inputs.rows, inputs.columns], self.head, inputs.targets, temperature)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the plain model in float32 under its own name; a copy only where an adapter is merged in."""
        layers = self._adapted()
        for name, tensor in self.causal.state_dict().items():
            if ".lora_" in name:
                continue
            owner, marked, leaf = name.partition(f"{BASE_LAYER}.")
            if marked and leaf == "weight":
                tensor = tensor + layers[owner].get_delta_weight(ADAPTER)  # noqa: PLW2901
            yield name.replace(BASE_LAYER, ""), tensor.detach()

    @contextmanager
    def adapter_off(self) -> Generator[None]:
        """The base model alone."""
        layers = list(self._adapted().values())
        try:
            _enable(layers, enabled=False)
            yield
        finally:
            _enable(layers, enabled=True)

    def _adapted(self) -> dict[str, _LowRank]:
        """Layers with an adapter, by name."""
        return {n: cast("_LowRank", m) for n, m in self.causal.named_modules() if isinstance(m, LoraLayer)}


def _enable(layers: Sequence[_LowRank], *, enabled: bool) -> None:
    for layer in layers:
        layer.enable_adapters(enabled)


def hidden_states(body: nn.Module, ids: Tensor) -> Tensor:
    """[B, L] ids to [B, L, H]."""
    return cast("Tensor", body(input_ids=ids, use_cache=False).last_hidden_state)


def load_policy(model_dir: Path, settings: wire.LearnerSettings) -> Policy:
    """The start model on this process's device. Raises JobFileError for a model that can't be trained here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.default_generator.manual_seed(settings.seed)  # the adapter's start is drawn on the CPU
    causal = _load_causal(model_dir, settings)
    causal.requires_grad_(not settings.use_peft)
    if settings.use_peft:
        _inject_adapter(causal, settings)
    causal.to(device)
    policy = Policy(causal, settings, device)
    _check_head(policy, model_dir)
    _check_names(policy, model_dir)
    _no_dropout(causal)
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return policy


def _load_causal(model_dir: Path, settings: wire.LearnerSettings) -> _CausalLM:
    transformers_logging.disable_progress_bar()
    try:
        model = cast("Any", AutoModelForCausalLM).from_pretrained(
            model_dir,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=settings.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise JobFileError(f"the model in {model_dir} can't be loaded for training: {error}") from error
    return cast("_CausalLM", model)


def _inject_adapter(causal: _CausalLM, settings: wire.LearnerSettings) -> None:
    if settings.lora_dropout > 0:
        raise JobFileError("lora_dropout must be 0: with dropout the learner's log-probs would not be the policy's")
    config = LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules=settings.lora_target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        get_peft_model(cast("Any", causal), config, adapter_name=ADAPTER)
    except ValueError as error:
        raise JobFileError(f"the LoRA adapter doesn't fit the model: {error}") from error


@torch.no_grad()
def _check_head(policy: Policy, model_dir: Path) -> None:
    """Refuse logits that are scaled, capped or biased after the head: the learner calls body and head apart."""
    ids = torch.arange(4, device=policy.device)[None] % policy.head.shape[0]
    whole = cast("Tensor", policy.causal(input_ids=ids, use_cache=False).logits).float()
    apart = hidden_states(policy.body, ids).float() @ policy.head.float().T
    if whole.shape != apart.shape or not torch.allclose(whole, apart, rtol=HEAD_TOLERANCE, atol=HEAD_TOLERANCE):
        raise JobFileError(
            f"the model in {model_dir} changes its logits after the head (scaling, soft-capping or a bias), "
            "which the learner doesn't support: choose a model with a plain head"
        )


def _check_names(policy: Policy, model_dir: Path) -> None:
    """What is published must bear the names of the start model's files, or the engine would load nothing from it."""
    stored: set[str] = set()
    for file in model_dir.glob("*.safetensors"):
        with cast("Any", safe_open)(file, framework="pt") as tensors:
            stored.update(tensors.keys())
    renamed = [name for name, _ in policy.merged() if name not in stored and name != policy.head_name]
    if renamed:
        raise JobFileError(
            f"the tensors of the model in {model_dir} are renamed when transformers loads it ({renamed[0]} is not in "
            "its files), so what is trained could not be published under the names that the engine knows"
        )


def _no_dropout(causal: _CausalLM) -> None:
    """Training mode, which gradient checkpointing wants, without a single random number."""
    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            cast("Any", module).attention_dropout = 0.0
    causal.train()
