"""The policy losses as pure functions on tensors: A-3PO (arXiv 2512.06547) and one table of loss types.

Per completion token: `behave` the log-prob that the generator recorded, `policy` the learner's (both after
temperature), `prox` the proximal one, `versions` the step number of the weights that sampled it. With
d = max(current_version - version, 0):

    alpha = 1/d (d >= 1), at d = 0: 1 ("behave") or 0 ("theta")
    prox  = alpha * behave + (1 - alpha) * policy      no gradient; equation 3 of the paper, in log space
    w     = exp(prox - behave)                         no gradient, capped
    r     = exp(policy - prox)
    loss  = sum(mask * -w * min(r*A, clip(r, 1-epsilon, 1+epsilon_high)*A)) / denominator

`w * r` is exp(policy - behave) whatever `prox` is, so the engine's numerical mismatch is corrected already: a further
sampler correction would square it. Everything here is float32 or better whatever the model's dtype.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

ZeroStaleness: TypeAlias = Literal["behave", "theta"]
WeightMode: TypeAlias = Literal["token_truncate", "token_mask", "none"]
KlEstimator: TypeAlias = Literal["k3", "k2"]


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """What a loss is computed from: [..., T] each, advantages also [...]; `reference` only where KL is in the loss."""

    policy: Tensor
    behave: Tensor
    prox: Tensor
    advantages: Tensor
    mask: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How far one step may move a token. `delta` bounds exp(policy - behave) from above where the advantage is < 0."""

    epsilon: float
    epsilon_high: float | None = None
    behave_weight_cap: float | None = None
    behave_weight_mode: WeightMode = "token_truncate"
    delta: float | None = None


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The clipped objective per place, [..., T]. Only `objective` carries gradient; it is 0 where masked out.

    raw_weight: w before the cap; weight: after it; low, high: the clip took the gradient below, above the band.
    """

    objective: Tensor
    ratio: Tensor
    raw_weight: Tensor
    weight: Tensor
    low: Tensor
    high: Tensor
    capped: Tensor


@dataclass(frozen=True, kw_only=True)
class DecoupledLoss:
    """A scalar to call backward on, and plain numbers over the masked-in tokens (names as in core/metrics.py)."""

    loss: Tensor
    metrics: dict[str, float]


def staleness_alpha(versions: Tensor, current_version: int, *, zero_staleness: ZeroStaleness = "behave") -> Tensor:
    """Weight of the behaviour policy in the proximal one, in [0, 1], shape of `versions`, float32."""
    return _alpha(versions, current_version, zero_staleness, torch.float32)


def _alpha(versions: Tensor, current_version: int, zero_staleness: ZeroStaleness, dtype: torch.dtype) -> Tensor:
    staleness = (current_version - versions).clamp(min=0).to(dtype)
    fresh = 1.0 if zero_staleness == "behave" else 0.0
    return torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), fresh)


@torch.no_grad()
def proximal_logprobs(
    behave: Tensor,
    policy: Tensor,
    versions: Tensor,
    current_version: int,
    *,
    zero_staleness: ZeroStaleness = "behave",
) -> Tensor:
    """A-3PO's proximal log-probs, token by token between behaviour and policy; tensors of one shape; no gradient."""
    behave, policy = _at_least_float32(behave), _at_least_float32(policy)
    dtype = torch.promote_types(behave.dtype, policy.dtype)
    alpha = _alpha(versions, current_version, zero_staleness, dtype)
    return torch.lerp(policy.to(dtype), behave.to(dtype), alpha)


def surrogate(tokens: LossTokens, clipping: Clipping) -> Surrogate:
    """The decoupled PPO objective per place. What stands at masked-out places is replaced before any exp."""
    keep = tokens.mask.bool()
    policy, behave, prox, advantages = (
        _kept(values, keep)
        for values in (tokens.policy, tokens.behave.detach(), tokens.prox.detach(), _per_token(tokens))
    )
    ratio = torch.exp(policy - prox)
    raw_weight = torch.exp(prox - behave)
    weight, capped = _capped(raw_weight, clipping)
    below, above = 1 - clipping.epsilon, 1 + _epsilon_high(clipping)
    low = (advantages < 0) & (ratio < below)
    high = (advantages > 0) & (ratio > above)
    bounded = torch.where(low | high, ratio.detach().clamp(below, above), ratio)
    if clipping.delta is not None:
        bounded = torch.where(advantages < 0, torch.minimum(bounded, clipping.delta / raw_weight), bounded)
    return Surrogate(
        objective=-weight * bounded * advantages,
        ratio=ratio.detach(),
        raw_weight=raw_weight,
        weight=weight,
        low=low,
        high=high,
        capped=capped,
    )


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    """Float32 or better, 0 where masked out: a NaN times 0 would be a NaN, in the gradient too."""
    return torch.where(keep, _at_least_float32(values), 0.0)


def _per_token(tokens: LossTokens) -> Tensor:
    """The advantages as [..., T]."""
    advantages = tokens.advantages
    if advantages.dim() == tokens.policy.dim() - 1:
        advantages = advantages.unsqueeze(-1)
    return advantages.expand_as(tokens.policy)


def _capped(weight: Tensor, clipping: Clipping) -> tuple[Tensor, Tensor]:
    """The weight after the cap, and where the cap acted."""
    cap, mode = clipping.behave_weight_cap, clipping.behave_weight_mode
    if cap is None or mode == "none":
        return weight, torch.zeros_like(weight, dtype=torch.bool)
    over = weight > cap
    return torch.where(over, cap if mode == "token_truncate" else 0.0, weight), over


def _epsilon_high(clipping: Clipping) -> float:
    return clipping.epsilon if clipping.epsilon_high is None else clipping.epsilon_high


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def decoupled_ppo_loss(
    policy: Tensor,
    behave: Tensor,
    prox: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
    behave_weight_cap: float | None = None,
    behave_weight_mode: WeightMode = "token_truncate",
    delta: float | None = None,
    denominator: float | Tensor | None = None,
) -> DecoupledLoss:
    """Decoupled PPO summed over tokens. policy, behave, prox, mask: one shape [..., T]; advantages: that or [...].

    `prox = behave` is plain PPO. `denominator`: of the whole optimiser step; default the masked-in tokens here, counted
    before the cap takes any out.
    """
    tokens = LossTokens(policy=policy, behave=behave, prox=prox, advantages=advantages, mask=mask)
    clipping = Clipping(
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        behave_weight_cap=behave_weight_cap,
        behave_weight_mode=behave_weight_mode,
        delta=delta,
    )
    result = surrogate(tokens, clipping)
    divisor = _token_count(tokens) if denominator is None else denominator
    return DecoupledLoss(loss=result.objective.sum() / divisor, metrics=_summary(result, tokens))


def _token_count(tokens: LossTokens) -> Tensor:
    return tokens.mask.bool().sum().clamp(min=1)


def _summary(result: Surrogate, tokens: LossTokens) -> dict[str, float]:
    """Shares and extremes over the masked-in tokens; empty where there is none."""
    mask = tokens.mask.bool()
    if not bool(mask.any()):
        return {}
    shares = {
        "clip_fraction": result.low | result.high,
        "clip_fraction_low": result.low,
        "clip_fraction_high": result.high,
        "weight_capped_fraction": result.capped,
    }
    return (
        {name: float(where[mask].double().mean()) for name, where in shares.items()}
        | extremes("ratio", result.ratio[mask])
        | extremes("weight", result.raw_weight[mask])
        | {"kl": approximate_kl((_at_least_float32(tokens.policy) - tokens.behave).detach()[mask])}
    )


def extremes(name: str, values: Tensor) -> dict[str, float]:
    """Least, mean and greatest of values [n], n >= 1."""
    return {
        f"{name}_min": float(values.min()),
        f"{name}_mean": float(values.double().mean()),
        f"{name}_max": float(values.max()),
    }


def approximate_kl(difference: Tensor) -> float:
    """Mean of exp(x) - 1 - x over x = policy - behave, [n], n >= 1."""
    x = difference.double()
    return float((torch.expm1(x) - x).mean())


# --- the table of loss types ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Of one optimiser step, counted before skipping, capping and micro-batching: N, T and the completion limit."""

    n_sequences: int
    n_tokens: int
    max_completion_length: int


@dataclass(frozen=True, kw_only=True)
class KlTerm:
    """KL to the reference in the loss: beta times `reference_kl`."""

    beta: float
    estimator: KlEstimator = "k3"
    bias_correction: bool = True


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """`loss`: this micro-batch's part of the optimiser step's; `tokens` [B, T], per sequence spread over its tokens."""

    loss: Tensor
    tokens: Surrogate


def _over_tokens(values: Tensor, _mask: Tensor, of: Denominators) -> Tensor:
    return values.sum() / max(of.n_tokens, 1)


def _over_sequence_means(values: Tensor, mask: Tensor, of: Denominators) -> Tensor:
    return _sequence_means(values, mask).sum() / max(of.n_sequences, 1)


def _over_completion_limit(values: Tensor, _mask: Tensor, of: Denominators) -> Tensor:
    return values.sum() / max(of.n_sequences * of.max_completion_length, 1)


def _sequence_means(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the masked-in tokens of each sequence, [B]; 0 for a sequence without any."""
    return _kept(values, mask).sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class LossType:
    """One row: whether ratio and weight are per token or per sequence, and what is summed over what.

    `reduce` takes values [B, T] that are 0 where masked out, the mask, and the optimiser step's denominators.
    """

    per_sequence: bool
    reduce: Callable[[Tensor, Tensor, Denominators], Tensor]


LOSS_TYPES: Mapping[str, LossType] = {
    "dapo": LossType(per_sequence=False, reduce=_over_tokens),
    "grpo": LossType(per_sequence=False, reduce=_over_sequence_means),
    "rloo": LossType(per_sequence=False, reduce=_over_sequence_means),
    "dr_grpo": LossType(per_sequence=False, reduce=_over_completion_limit),
    "gspo": LossType(per_sequence=True, reduce=_over_sequence_means),
}


def policy_loss(
    tokens: LossTokens, loss_type: LossType, clipping: Clipping, denominators: Denominators, kl: KlTerm | None = None
) -> PolicyLoss:
    """The loss of one micro-batch [B, T] by its row of the table; summed over micro-batches, the optimiser step's."""
    mask = tokens.mask.bool()
    result = surrogate(_sequence_level(tokens, mask) if loss_type.per_sequence else tokens, clipping)
    objective = result.objective
    if kl is not None and tokens.reference is not None:
        objective = objective + kl.beta * _kl_per_token(tokens, tokens.reference, mask, kl)
    return PolicyLoss(loss=loss_type.reduce(objective, mask, denominators), tokens=result)


def _sequence_level(tokens: LossTokens, mask: Tensor) -> LossTokens:
    """Gspo (arXiv 2507.18071): the same objective on the sequence means of the log-probs, spread over the tokens."""
    policy, behave, prox = (
        _sequence_means(values, mask).unsqueeze(-1).expand_as(mask)
        for values in (tokens.policy, tokens.behave, tokens.prox)
    )
    return replace(tokens, policy=policy, behave=behave, prox=prox)


def _kl_per_token(tokens: LossTokens, reference: Tensor, mask: Tensor, kl: KlTerm) -> Tensor:
    policy, reference, behave = (_kept(values, mask) for values in (tokens.policy, reference, tokens.behave))
    return reference_kl(policy, reference, behave, estimator=kl.estimator, bias_correction=kl.bias_correction)


def reference_kl(
    policy: Tensor, reference: Tensor, behave: Tensor, *, estimator: KlEstimator = "k3", bias_correction: bool = True
) -> Tensor:
    """KL of the policy to the reference per token, with gradient: with x = reference - policy, exp(x)-1-x or x^2/2.

    `bias_correction` (TRL's use_bias_correction_kl) weighs it by exp(policy - behave), without gradient.
    """
    x = reference.detach() - policy
    kl = torch.expm1(x) - x if estimator == "k3" else 0.5 * x**2
    return kl * torch.exp(policy.detach() - behave) if bias_correction else kl
