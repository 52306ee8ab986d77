"""Log-probs of given tokens from hidden states, in slices, so that `tokens x vocabulary` never exists as a whole.

One slice of float32 logits lives at a time; the backward pass computes it again instead of keeping it.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

SLICE_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # float32 logits alive at once; part of the numerics key


class TokenScores(NamedTuple):
    """Per token, float32 [n]: its log-prob (with gradient) and the entropy of its distribution in nats (without)."""

    logps: Tensor
    entropy: Tensor


def slice_rows(device: torch.device, vocabulary: int) -> int:
    """Tokens per slice."""
    return max(1, SLICE_ELEMENTS[device.type] // vocabulary)


def token_scores(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> TokenScores:
    """Scores of targets [n] as hidden [n, H] predicts them through head [V, H]; in float32, outside autocast."""
    rows = slice_rows(hidden.device, head.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = cast(
            "tuple[Tensor, Tensor]",
            _SlicedLogProbs.apply(hidden.float(), head.float(), targets, temperature, rows),  # pyright: ignore[reportUnknownMemberType]
        )
    return TokenScores(*outputs)


class _SlicedLogProbs(torch.autograd.Function):
    """log softmax(hidden @ head.T / temperature)[targets], and the entropy."""

    @staticmethod
    def forward(  # noqa: PLR0917 (autograd's form)  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        logps = hidden.new_empty(len(targets))
        entropy = hidden.new_empty(len(targets))
        for part in _slices(len(targets), rows):
            log_softmax = _log_softmax(hidden[part], head, temperature)
            logps[part] = log_softmax.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -(log_softmax.exp().mul_(log_softmax)).sum(-1)
        ctx.save_for_backward(hidden, head, targets)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor, _entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, head, targets = cast("tuple[Tensor, Tensor, Tensor]", ctx.saved_tensors)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for part in _slices(len(targets), ctx.rows):
            # d logp[y] / d logits = (1[y] - softmax) / temperature
            of_logits = _log_softmax(hidden[part], head, ctx.temperature).exp_().mul_(-grad[part, None])
            of_logits.scatter_add_(1, targets[part, None], grad[part, None]).div_(ctx.temperature)
            grad_hidden[part] = of_logits @ head
            if grad_head is not None:
                grad_head.addmm_(of_logits.T, hidden[part])
        return grad_hidden, grad_head, None, None, None


def _slices(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def _log_softmax(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax((hidden @ head.T).div_(temperature), dim=-1)
