"""The losses against vectors that were computed elsewhere, in value and in gradient."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfd.workers.losses import (
    LOSS_TYPES,
    Clipping,
    Denominators,
    KlTerm,
    LossTokens,
    decoupled_ppo_loss,
    policy_loss,
    proximal_logprobs,
    staleness_alpha,
    surrogate,
)

VECTORS = Path(__file__).parents[1] / "vectors"
EXACT = {"rtol": 0.0, "atol": 1e-6}


def vectors(*names: str) -> list[dict[str, Any]]:
    return [case for name in names for case in json.loads((VECTORS / f"{name}.json").read_text())]


DECOUPLED = vectors("decoupled_ppo", "decoupled_ppo_extra")
TRL = vectors("trl_losses")


def f64(values: Any, *, grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def clipping_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in ("epsilon", "epsilon_high", "behave_weight_cap", "behave_weight_mode")}


@pytest.mark.parametrize("case", DECOUPLED, ids=lambda case: case["name"])
def test_alpha_and_proximal_logprobs_match_the_vector(case):
    versions = torch.tensor(case["versions"])
    options = {"zero_staleness": case["zero_staleness"]}
    alpha = staleness_alpha(versions, case["current_version"], **options)
    prox = proximal_logprobs(
        f64(case["behave_logps"]), f64(case["policy_logps"], grad=True), versions, case["current_version"], **options
    )
    torch.testing.assert_close(alpha.double(), f64(case["expected"]["alpha"]), **EXACT)
    torch.testing.assert_close(prox, f64(case["expected"]["prox_logps"]), **EXACT)
    assert not prox.requires_grad


@pytest.mark.parametrize("case", DECOUPLED, ids=lambda case: case["name"])
def test_the_decoupled_loss_matches_the_vector_in_value_and_gradient(case):
    behave, policy = f64(case["behave_logps"]), f64(case["policy_logps"], grad=True)
    versions, mask = torch.tensor(case["versions"]), torch.tensor(case["mask"])
    prox = proximal_logprobs(behave, policy, versions, case["current_version"], zero_staleness=case["zero_staleness"])
    result = decoupled_ppo_loss(policy, behave, prox, f64(case["advantages"]), mask, **clipping_of(case))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-6)
    torch.testing.assert_close(policy.grad, f64(case["expected"]["grad_policy_logps"]), **EXACT)
    assert result.metrics["clip_fraction"] == pytest.approx(case["expected"]["clip_fraction"])


@pytest.mark.parametrize("case", DECOUPLED, ids=lambda case: case["name"])
def test_weight_and_ratio_match_the_vector(case):
    behave, policy, prox = f64(case["behave_logps"]), f64(case["policy_logps"]), f64(case["expected"]["prox_logps"])
    tokens = LossTokens(
        policy=policy, behave=behave, prox=prox, advantages=f64(case["advantages"]), mask=torch.ones(len(behave))
    )
    result = surrogate(tokens, Clipping(**clipping_of(case)))
    torch.testing.assert_close(result.weight, f64(case["expected"]["behave_weight"]), **EXACT)
    torch.testing.assert_close(result.ratio, f64(case["expected"]["ratio"]), **EXACT)


@pytest.mark.parametrize("case", TRL, ids=lambda c: f"{c['loss_type']}-{c['importance_sampling_level']}-{c['beta']}")
def test_the_table_matches_trl_in_value_and_gradient(case):
    loss_type = "gspo" if case["importance_sampling_level"] == "sequence" else case["loss_type"]
    policy, old = f64(case["policy_logps"], grad=True), f64(case["old_logps"])
    mask = torch.tensor(case["mask"])
    tokens = LossTokens(
        policy=policy,
        behave=old,
        prox=old,
        advantages=f64(case["advantages"]),
        mask=mask,
        reference=f64(case["ref_logps"]),
    )
    result = policy_loss(
        tokens,
        LOSS_TYPES[loss_type],
        Clipping(epsilon=case["epsilon"], epsilon_high=case["epsilon_high"]),
        Denominators(
            n_sequences=len(mask), n_tokens=int(mask.sum()), max_completion_length=case["max_completion_length"]
        ),
        KlTerm(beta=case["beta"], bias_correction=False),
    )
    result.loss.backward()
    assert result.loss.item() == pytest.approx(case["expected"]["loss"], abs=1e-6)
    torch.testing.assert_close(policy.grad, f64(case["expected"]["grad_policy_logps"]), **EXACT)
