"""What a learner step refuses, and its settings in the losses' own terms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhfd.core import wire
from rlhfd.errors import JobFileError, NonFiniteError
from rlhfd.workers.batch import MicroBatch, Rollout
from rlhfd.workers.losses import LOSS_TYPES, Clipping, Denominators


def clipping_of(settings: wire.StepSettings) -> Clipping:
    """The step's values as the losses take them."""
    return Clipping(
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        behave_weight_cap=settings.behave_weight_cap,
        behave_weight_mode=settings.behave_weight_mode,
        delta=settings.delta,
    )


def denominators_of(settings: wire.StepSettings, minibatch: int) -> Denominators:
    """N and T of one optimiser step."""
    return Denominators(
        n_sequences=settings.n_sequences[minibatch],
        n_tokens=settings.n_tokens[minibatch],
        max_completion_length=settings.max_completion_length,
    )


def check_settings(settings: wire.StepSettings) -> None:
    """Raises JobFileError for a loss that is not known here, ValueError for settings that contradict each other."""
    if settings.loss_type not in LOSS_TYPES:
        raise JobFileError(f'loss_type "{settings.loss_type}" is not one of {", ".join(LOSS_TYPES)}')
    if settings.beta != 0:
        raise JobFileError(
            f"beta = {settings.beta} needs a reference model, which this learner doesn't keep: set it to 0"
        )
    if len(settings.learning_rates) != settings.minibatches * settings.num_iterations:
        raise ValueError(f"{len(settings.learning_rates)} learning rates for {settings.minibatches} minibatches")
    if not len(settings.n_sequences) == len(settings.n_tokens) == settings.minibatches:
        raise ValueError(f"denominators for {len(settings.n_tokens)} of {settings.minibatches} minibatches")


def check_rollouts(rollouts: Sequence[Rollout], minibatches: int, vocabulary: int) -> None:
    """Raises NonFiniteError for a recorded log-prob that is none, ValueError for what is no rollout of this model."""
    if len({rollout.id for rollout in rollouts}) != len(rollouts):
        raise ValueError("a rollout comes twice in one step")
    for rollout in rollouts:
        ids = torch.cat((rollout.prompt, rollout.tokens))
        if not 0 <= rollout.minibatch < minibatches or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise ValueError(f"rollout {rollout.id} has a token or a minibatch out of range")
    bad = [r for r in rollouts if not r.masked and not bool(torch.isfinite(r.behave).all())]
    if bad:
        raise non_finite("the recorded log-prob", bad)


def refuse_non_finite(what: str, values: Tensor, batch: MicroBatch) -> None:
    """Raises NonFiniteError naming the rollouts with a masked-in NaN or Inf; values [B, T]."""
    bad = (~torch.isfinite(values) & batch.mask).any(-1)
    if bool(bad.any()):
        raise non_finite(what, [r for r, is_bad in zip(batch.rollouts, bad.cpu().numpy(), strict=True) if is_bad])


def non_finite(what: str, rollouts: Sequence[Rollout]) -> NonFiniteError:
    """The error that names the rollouts."""
    ids = [rollout.id for rollout in rollouts]
    named = ", ".join(str(rollout_id) for rollout_id in ids[:8]) + (" …" if len(ids) > 8 else "")
    return NonFiniteError(
        f"{what} is NaN or infinite in rollouts {named}; the step was not applied: lower learning_rate or "
        "max_grad_norm, or look at these samples",
        rollout_ids=ids,
    )
