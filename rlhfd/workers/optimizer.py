"""AdamW over the trainable parameters, its state by name, and the checksums of a fingerprint.

A step is all or nothing: where anything goes wrong after the first of several optimiser steps, parameters and state
go back to what they were.
"""

import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfd.core import wire

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """Fused AdamW; no decay on norms and biases, which are the tensors of fewer than two dimensions.

    `taken`: optimiser steps since this object was made; an undone one does not count.
    """

    taken: int = 0

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: wire.LearnerSettings) -> None:
        self.parameters = dict(parameters)
        everything = list(self.parameters.values())
        groups = [
            {"params": [p for p in everything if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in everything if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )
        for parameter in everything:  # now, so that memory fails at load and a checkpoint always has every tensor
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def state(self) -> dict[str, Tensor]:
        """The live state tensors, `<parameter>/<name of the state>`."""
        return {
            f"{name}/{kind}": cast("Tensor", self._adamw.state[parameter][kind])
            for name, parameter in self.parameters.items()
            for kind in STATE_NAMES
        }

    def zero_grad(self) -> None:
        """Give the gradients' memory back."""
        self._adamw.zero_grad(set_to_none=True)

    def fill_grads(self) -> None:
        """A parameter that nothing reached has a gradient of zeros: its moments decay as without skipping."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def grad_norm(self) -> Tensor:
        """Of all gradients together, before clipping."""
        return torch.nn.utils.get_total_norm(self._grads())

    def step(self, *, learning_rate: float, norm: Tensor, max_norm: float) -> None:
        """Clip to `max_norm` and move the parameters."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        cast("Any", self._adamw).step()
        self.taken += 1

    @contextmanager
    def restored_on_error(self, *, steps: int) -> Generator[None]:
        """Inside, `steps` optimiser steps are made; an error undoes them. A single one comes last: it needs no copy."""
        live = [*self.parameters.values(), *self.state().values()]
        saved = [t.detach().to("cpu", copy=True) for t in live] if steps > 1 else []
        taken = self.taken
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for tensor, before in zip(live, saved, strict=False):
                    tensor.copy_(before)
            self.taken = taken if saved else self.taken
            raise
        finally:
            self.zero_grad()

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Hex over all bits: each tensor's, read as integers, summed mod 2^64 where it lives, and folded in name order."""
    fold = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        total = int(_as_integers(tensor).sum(dtype=torch.int64)) % 2**64
        fold.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {total}\n".encode())
    return fold.hexdigest()


def _as_integers(tensor: Tensor) -> Tensor:
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
