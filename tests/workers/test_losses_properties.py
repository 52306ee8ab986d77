"""The identities of the decoupled loss on random tokens, before the cap unless a cap is the point."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhfd.workers.losses import (
    LOSS_TYPES,
    Clipping,
    Denominators,
    LossTokens,
    decoupled_ppo_loss,
    policy_loss,
    proximal_logprobs,
    reference_kl,
    staleness_alpha,
    surrogate,
)

VERSION = 20
EPSILON, EPSILON_HIGH = 0.2, 0.28
CLOSE = {"rtol": 1e-9, "atol": 1e-9}

logp = st.floats(-8, -1e-3, allow_nan=False)
token = st.tuples(logp, logp, st.integers(VERSION - 9, VERSION + 2), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
tokens = st.lists(token, min_size=1, max_size=24)
anchors = st.sampled_from(["behave", "theta"])


def columns(rows):
    """behave, policy (a leaf), versions, advantages, staleness."""
    behave, policy, versions, advantages = (list(column) for column in zip(*rows, strict=True))
    staleness = torch.tensor([max(VERSION - v, 0) for v in versions])
    leaf = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    return f64(behave), leaf, torch.tensor(versions), f64(advantages), staleness


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def loss_of(policy, behave, prox, advantages, **options):
    settings = {"epsilon": EPSILON, "epsilon_high": EPSILON_HIGH} | options
    return decoupled_ppo_loss(policy, behave, prox, advantages, torch.ones(len(policy)), **settings)


def tokens_of(policy, behave, prox, advantages):
    return LossTokens(policy=policy, behave=behave, prox=prox, advantages=advantages, mask=torch.ones(len(policy)))


def plain_ppo(policy, behave, advantages):
    ratio = torch.exp(policy - behave)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON_HIGH) * advantages).mean()


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf)[0]


def clear_of_bounds(drift, staleness):
    """No token within rounding of the clip band's edge, where the gradient jumps."""
    edges = torch.stack(
        [staleness.clamp(min=1) * math.log(1 - EPSILON), staleness.clamp(min=1) * math.log1p(EPSILON_HIGH)]
    )
    return bool(((drift - edges).abs() > 1e-6).all())


@given(tokens, anchors)
def test_weight_times_ratio_is_the_whole_drift(rows, anchor):
    behave, policy, versions, advantages, _ = columns(rows)
    prox = proximal_logprobs(behave, policy, versions, VERSION, zero_staleness=anchor)
    result = surrogate(tokens_of(policy, behave, prox, advantages), Clipping(epsilon=EPSILON))
    torch.testing.assert_close(result.weight * result.ratio, torch.exp(policy.detach() - behave), **CLOSE)


@given(tokens, anchors)
def test_the_proximal_logprob_lies_between_behaviour_and_policy(rows, anchor):
    behave, policy, versions, *_ = columns(rows)
    prox = proximal_logprobs(behave, policy, versions, VERSION, zero_staleness=anchor)
    assert bool((torch.minimum(behave, policy) <= prox).all())
    assert bool((prox <= torch.maximum(behave, policy)).all())


@given(tokens)
def test_up_to_one_step_of_staleness_it_is_plain_ppo(rows):
    behave, policy, versions, advantages, _ = columns(rows)
    fresh = versions.clamp(min=VERSION - 1)
    prox = proximal_logprobs(behave, policy, fresh, VERSION)
    ours, theirs = loss_of(policy, behave, prox, advantages).loss, plain_ppo(policy, behave, advantages)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(gradient(ours, policy), gradient(theirs, policy), **CLOSE)


@given(tokens)
def test_the_gradient_is_the_drift_inside_the_band_and_zero_outside(rows):
    behave, policy, versions, advantages, staleness = columns(rows)
    drift = (policy - behave).detach()
    assume(clear_of_bounds(drift, staleness))
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    found = gradient(loss_of(policy, behave, prox, advantages, denominator=7.0).loss, policy)
    depth = staleness.clamp(min=1)
    above = torch.exp(drift) > (1 + EPSILON_HIGH) ** depth
    below = torch.exp(drift) < (1 - EPSILON) ** depth
    clipped = torch.where(advantages > 0, above, below)
    expected = torch.where(clipped, 0.0, -advantages * torch.exp(drift) / 7.0)
    torch.testing.assert_close(found, expected, **CLOSE)


@given(tokens)
def test_the_clip_fraction_counts_only_the_side_that_loses_gradient(rows):
    behave, policy, versions, advantages, staleness = columns(rows)
    drift = (policy - behave).detach()
    assume(clear_of_bounds(drift, staleness))
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    result = loss_of(policy, behave, prox, advantages)
    dead = gradient(result.loss, policy) == 0
    assert result.metrics["clip_fraction"] == pytest.approx(float(dead.double().mean()))


@given(tokens, st.floats(1.05, 6))
def test_a_cap_acts_exactly_where_the_drift_passes_its_power(rows, cap):
    behave, policy, versions, advantages, staleness = columns(rows)
    drift = (policy - behave).detach()
    power = staleness.double() / (staleness - 1).clamp(min=1)
    bound = power * math.log(cap)
    assume(bool(((drift - bound).abs() > 1e-9).all()))
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    result = surrogate(tokens_of(policy, behave, prox, advantages), Clipping(epsilon=EPSILON, behave_weight_cap=cap))
    assert torch.equal(result.capped, (staleness >= 2) & (drift > bound))


@given(tokens, st.floats(1.05, 6))
def test_a_truncated_token_keeps_the_capped_gradient(rows, cap):
    behave, policy, versions, advantages, staleness = columns(rows)
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    clipping = Clipping(epsilon=EPSILON, epsilon_high=EPSILON_HIGH, behave_weight_cap=cap)
    result = surrogate(tokens_of(policy, behave, prox, advantages), clipping)
    truncated = result.capped & ~result.low & ~result.high
    found = gradient(result.objective.sum(), policy)
    expected = -advantages * cap * torch.exp((policy.detach() - behave) / staleness.clamp(min=1))
    torch.testing.assert_close(found[truncated], expected[truncated], **CLOSE)


@given(tokens, st.floats(1.05, 6))
def test_a_masking_cap_takes_the_token_out_of_the_sum_but_not_out_of_the_count(rows, cap):
    behave, policy, versions, advantages, _ = columns(rows)
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    options = {"behave_weight_cap": cap, "behave_weight_mode": "token_mask"}
    result = surrogate(
        tokens_of(policy, behave, prox, advantages), Clipping(epsilon=EPSILON, epsilon_high=EPSILON_HIGH, **options)
    )
    uncapped = surrogate(
        tokens_of(policy, behave, prox, advantages), Clipping(epsilon=EPSILON, epsilon_high=EPSILON_HIGH)
    )
    expected = uncapped.objective[~result.capped].sum() / len(rows)
    torch.testing.assert_close(loss_of(policy, behave, prox, advantages, **options).loss, expected, **CLOSE)


@given(tokens, st.floats(1.5, 4))
def test_delta_bounds_the_drift_from_above_where_the_advantage_is_negative(rows, delta):
    behave, policy, versions, advantages, _ = columns(rows)
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    with_delta, without = (
        surrogate(
            tokens_of(policy, behave, prox, advantages),
            Clipping(epsilon=EPSILON, epsilon_high=EPSILON_HIGH, delta=bound),
        ).objective
        for bound in (delta, None)
    )
    negative = advantages < 0
    torch.testing.assert_close(with_delta[~negative], without[~negative])
    bounded = torch.minimum(without, -advantages * delta)[negative]
    torch.testing.assert_close(with_delta[negative], bounded, **CLOSE)
    over = negative & (torch.exp(policy.detach() - behave) > delta * (1 + 1e-9))
    assert bool((gradient(with_delta.sum(), policy)[over] == 0).all())


@given(tokens, st.data())
def test_nothing_that_stands_at_a_masked_out_place_is_read(rows, data):
    behave, policy, versions, advantages, _ = columns(rows)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    clean = decoupled_ppo_loss(policy, behave, prox, advantages, mask, epsilon=EPSILON)
    poison = [torch.where(mask, column, math.nan) for column in (policy, behave, prox, advantages)]
    dirty = decoupled_ppo_loss(*poison, mask, epsilon=EPSILON)
    assert torch.equal(clean.loss, dirty.loss)
    assert clean.metrics == dirty.metrics
    assert torch.equal(gradient(dirty.loss, policy), gradient(clean.loss, policy))


@given(tokens, st.sampled_from(sorted(LOSS_TYPES)), st.integers(1, 5))
def test_losses_of_micro_batches_sum_to_the_loss_of_the_whole(rows, loss_type, width):
    behave, policy, versions, advantages, _ = columns(rows)
    prox = proximal_logprobs(behave, policy, versions, VERSION)
    count = -(-len(rows) // width)  # sequences of `width` tokens, the last one shorter

    def folded(column):
        padding = torch.zeros(count * width - len(rows), dtype=column.dtype)
        return torch.cat((column, padding)).reshape(count, width)

    mask = folded(torch.ones(len(rows))).bool()
    whole = LossTokens(
        policy=folded(policy),
        behave=folded(behave),
        prox=folded(prox),
        advantages=advantages[::width][:count],
        mask=mask,
    )
    parts = [
        LossTokens(
            policy=whole.policy[i : i + 1],
            behave=whole.behave[i : i + 1],
            prox=whole.prox[i : i + 1],
            advantages=whole.advantages[i : i + 1],
            mask=mask[i : i + 1],
        )
        for i in range(count)
    ]
    of = Denominators(n_sequences=count, n_tokens=len(rows), max_completion_length=width)
    row, clipping = LOSS_TYPES[loss_type], Clipping(epsilon=EPSILON, epsilon_high=EPSILON_HIGH)
    together = policy_loss(whole, row, clipping, of).loss
    apart = torch.stack([policy_loss(part, row, clipping, of).loss for part in parts]).sum()
    torch.testing.assert_close(together, apart, **CLOSE)
    torch.testing.assert_close(gradient(together, policy), gradient(apart, policy), **CLOSE)


@given(tokens)
def test_alpha_falls_with_staleness_and_a_label_ahead_counts_as_fresh(rows):
    versions = columns(rows)[2]
    alpha = staleness_alpha(versions, VERSION)
    assert bool(((alpha > 0) & (alpha <= 1)).all())
    assert bool((alpha[versions >= VERSION - 1] == 1).all())
    assert bool((alpha[versions < VERSION - 1] <= 0.5).all())


@given(tokens, st.sampled_from(["k3", "k2"]))
def test_the_kl_to_the_reference_is_never_negative_and_zero_at_it(rows, estimator):
    behave, policy, *_ = columns(rows)
    away = reference_kl(policy, behave, behave, estimator=estimator, bias_correction=False)
    assert bool((away >= 0).all())
    at = reference_kl(policy, policy.detach(), behave, estimator=estimator)
    assert torch.equal(at, torch.zeros_like(at))
    assert torch.equal(gradient(at.sum(), policy), torch.zeros_like(at))


@given(tokens)
def test_bias_correction_makes_the_kl_gradient_that_of_the_true_kl(rows):
    """With k3 weighed by exp(policy - behave): w * (1 - exp(reference - policy)) per token."""
    behave, policy, _, reference, _ = columns(rows)
    found = gradient(reference_kl(policy, reference, behave).sum(), policy)
    expected = torch.exp(policy - behave) * (1 - torch.exp(reference - policy))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_dtype_does_not_reach_the_loss(dtype):
    policy = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    behave = torch.tensor([-1.2, -1.8], dtype=dtype)
    prox = proximal_logprobs(behave, policy, torch.tensor([3, 5]), 6)
    result = decoupled_ppo_loss(policy, behave, prox, torch.tensor([1.0, -1.0]), torch.ones(2), epsilon=EPSILON)
    assert prox.dtype == result.loss.dtype == torch.float32


def test_a_batch_without_a_token_has_loss_zero_and_no_metrics():
    policy = torch.tensor([-1.0], requires_grad=True)
    result = decoupled_ppo_loss(policy, policy, policy, torch.ones(1), torch.zeros(1), epsilon=EPSILON)
    assert (result.loss.item(), result.metrics) == (0.0, {})


def test_advantages_of_sequences_reach_all_their_tokens():
    policy = torch.full((2, 3), -1.0, requires_grad=True)
    of_sequences = decoupled_ppo_loss(
        policy, policy, policy, torch.tensor([1.0, -2.0]), torch.ones(2, 3), epsilon=EPSILON
    )
    of_tokens = decoupled_ppo_loss(
        policy, policy, policy, torch.tensor([[1.0] * 3, [-2.0] * 3]), torch.ones(2, 3), epsilon=EPSILON
    )
    assert of_sequences.loss.item() == of_tokens.loss.item() == pytest.approx(0.5)
