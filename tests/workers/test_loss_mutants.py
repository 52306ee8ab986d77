"""Each plausible mistake in the losses makes a named test fail: the tests above them are no decoration."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from rlhfd.workers import batch, losses
from tests.workers import test_learner_step, test_losses
from tests.workers.steps import session_of

VECTOR_TEST = "test_the_decoupled_loss_matches_the_vector_in_value_and_gradient"
TRACE_TEST = "test_a_trace_shows_staleness_and_alpha_of_each_token_by_its_own_version"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`plant` puts the mistake in; `caught_by` is the test that must fail."""

    plant: Callable[[pytest.MonkeyPatch], None]
    caught_by: str


def versions_not_shifted(patch: pytest.MonkeyPatch) -> None:
    """The labels stay one place behind, as where mask and log-probs are shifted to next-token order without them."""
    collate = batch.collate

    def lagging(*args: Any) -> batch.MicroBatch:
        made = collate(*args)
        return replace(made, versions=made.versions.roll(1, dims=-1))

    patch.setattr(batch, "collate", lagging)


def alpha_inverted(patch: pytest.MonkeyPatch) -> None:
    right = losses._alpha
    patch.setattr(losses, "_alpha", lambda *args: 1 - right(*args))


def denominator_after_the_cap(patch: pytest.MonkeyPatch) -> None:
    def mistaken(policy, behave, prox, advantages, mask, **options):
        kept = mask
        if options["behave_weight_mode"] == "token_mask":
            kept = mask.bool() & (torch.exp(prox - behave) <= options["behave_weight_cap"])
        return losses.decoupled_ppo_loss(policy, behave, prox, advantages, mask, **options, denominator=kept.sum())

    patch.setattr(test_losses, "decoupled_ppo_loss", mistaken)


def detach_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(test_losses, "proximal_logprobs", losses.proximal_logprobs.__wrapped__)
    patch.setattr(torch.Tensor, "detach", lambda tensor: tensor)
    summary = losses._summary

    def without_gradient(result, tokens):  # which would only warn about it
        plain = {field.name: getattr(result, field.name).data for field in fields(result)}
        return summary(losses.Surrogate(**plain), replace(tokens, policy=tokens.policy.data))

    patch.setattr(losses, "_summary", without_gradient)


def weight_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(losses, "_capped", lambda weight, _: (torch.ones_like(weight), torch.zeros_like(weight).bool()))


def ratio_to_the_behaviour_policy(patch: pytest.MonkeyPatch) -> None:
    """The sampler's mismatch corrected twice."""
    right = losses.decoupled_ppo_loss

    def mistaken(policy, behave, prox, advantages, mask, **options):
        twice = right(policy, behave, prox, advantages * torch.exp(policy - behave).detach(), mask, **options)
        return replace(twice, metrics=right(policy, behave, prox, advantages, mask, **options).metrics)

    patch.setattr(test_losses, "decoupled_ppo_loss", mistaken)


def low_and_high_epsilon_swapped(patch: pytest.MonkeyPatch) -> None:
    right = losses.surrogate

    def mistaken(tokens, clipping):
        high = losses._epsilon_high(clipping)
        return right(tokens, replace(clipping, epsilon=high, epsilon_high=clipping.epsilon))

    patch.setattr(losses, "surrogate", mistaken)


MUTANTS = {
    "versions not shifted": Mutant(plant=versions_not_shifted, caught_by=TRACE_TEST),
    "alpha inverted": Mutant(plant=alpha_inverted, caught_by=VECTOR_TEST),
    "denominator after the cap": Mutant(plant=denominator_after_the_cap, caught_by=VECTOR_TEST),
    "detach forgotten": Mutant(plant=detach_forgotten, caught_by=VECTOR_TEST),
    "weight left out": Mutant(plant=weight_left_out, caught_by=VECTOR_TEST),
    "mismatch corrected twice": Mutant(plant=ratio_to_the_behaviour_policy, caught_by=VECTOR_TEST),
    "epsilons swapped": Mutant(plant=low_and_high_epsilon_swapped, caught_by=VECTOR_TEST),
}


def run_vector_test() -> None:
    for case in test_losses.DECOUPLED:
        getattr(test_losses, VECTOR_TEST)(case)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_caught(name, monkeypatch, tiny_model):
    mutant = MUTANTS[name]

    def run() -> None:
        if mutant.caught_by == VECTOR_TEST:
            run_vector_test()
        else:
            getattr(test_learner_step, mutant.caught_by)(session_of(tiny_model))

    run()
    with monkeypatch.context() as patch:
        mutant.plant(patch)
        with pytest.raises(AssertionError):
            run()
