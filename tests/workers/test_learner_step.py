"""One learner step on the tiny model: what moves the parameters, and what must not."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhfd.errors import JobFileError, NonFiniteError
from rlhfd.workers.batch import micro_batches
from rlhfd.workers.optimizer import checksum
from tests.workers.steps import (
    TEMPERATURE,
    as_read,
    group_frames,
    learn,
    learn_frame,
    make_rollouts,
    own_logps,
    parameters,
    read_floats,
    read_ints,
    session_of,
    step_settings,
)

UNCLIPPED = 1e9  # a norm that no gradient reaches


@pytest.fixture
def session(tiny_model):
    return session_of(tiny_model)


def gradients(session):
    """Of the first step, from AdamW's first moments: (1 - beta1) * g."""
    return {n: t / 0.1 for n, t in session.optimizer.state().items() if n.endswith("/exp_avg")}


def fingerprint(session):
    return checksum(session.policy.trainable()), checksum(session.optimizer.state())


def at_version(session, version):
    """Walk there with steps that move nothing, so that labels may lie behind."""
    rollouts = make_rollouts(session.policy, version=0, count=2)
    while session.loaded().step < version:
        learn(session, rollouts, learning_rates=[0.0])
    return session


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=tolerance)


# --- what a step is --------------------------------------------------------------------------------------------------


def test_a_step_moves_every_parameter_and_makes_the_next_version(session):
    before = parameters(session)
    learned = learn(session, make_rollouts(session.policy, version=0))
    assert session.loaded().step == learned.step == 1
    assert all(not torch.equal(before[name], now) for name, now in parameters(session).items())


def full_loss(model, rollouts, version):
    """dapo with loglinear anchors, written out over whole logits: no slices, no padding, no frames."""
    total, tokens = 0.0, sum(len(r.tokens) for r in rollouts)
    for r in rollouts:
        logits = model(torch.tensor([r.prompt + r.tokens])).logits[0, len(r.prompt) - 1 : -1]
        logps = torch.log_softmax(logits.float() / TEMPERATURE, -1)
        policy = logps.gather(1, torch.tensor(r.tokens)[:, None])[:, 0]
        for t, v in enumerate(r.versions):
            lb, lt = torch.tensor(r.logps[t]), policy[t]
            alpha = 1 / max(version - v, 1)
            lp = (alpha * lb + (1 - alpha) * lt).detach()
            w, ratio = torch.exp(lp - lb).clamp(max=5.0), torch.exp(lt - lp)
            a = r.advantage
            total = total - w * torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) / tokens
    return total


def test_loss_and_gradient_are_those_of_the_formula_over_whole_logits(session, tiny_model):
    at_version(session, 3)
    rollouts = make_rollouts(session.policy, version=3)
    session = session_of(tiny_model)  # fresh moments, same weights
    session._step = 3
    learned = learn(session, rollouts, max_grad_norm=UNCLIPPED)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loss = full_loss(model, rollouts, version=3)
    loss.backward()
    expected = {f"{name}/exp_avg": p.grad for name, p in model.named_parameters()}
    assert learned.fingerprint.losses == [pytest.approx(loss.item(), abs=1e-5)]
    assert_close(gradients(session), expected, 1e-5)
    norm = torch.nn.utils.get_total_norm(list(expected.values())).item()
    assert learned.fingerprint.grad_norms == [pytest.approx(norm, rel=1e-5)]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "rloo", "gspo"])
def test_the_split_into_micro_batches_changes_nothing(tiny_model, loss_type):
    whole, split = session_of(tiny_model), session_of(tiny_model)
    rollouts = make_rollouts(whole.policy, version=0)
    apart = [replace(r, micro_batch=number // 2) for number, r in enumerate(rollouts)]
    one = learn(whole, rollouts, loss_type=loss_type, max_grad_norm=UNCLIPPED)
    three = learn(split, apart, loss_type=loss_type, max_grad_norm=UNCLIPPED)
    assert one.fingerprint.losses == pytest.approx(three.fingerprint.losses, abs=1e-5)
    assert_close(gradients(whole), gradients(split), 1e-5)


def test_the_norm_is_recorded_before_clipping_and_the_gradient_is_clipped(session):
    learned = learn(session, make_rollouts(session.policy, version=0), max_grad_norm=0.5)
    assert learned.fingerprint.grad_norms[0] > 1.0
    clipped = torch.nn.utils.get_total_norm(list(gradients(session).values())).item()
    assert clipped == pytest.approx(0.5, rel=1e-4)


def test_equal_steps_from_equal_weights_have_equal_bits(tiny_model):
    sessions = [session_of(tiny_model), session_of(tiny_model)]
    rollouts = make_rollouts(sessions[0].policy, version=0)
    first, second = (learn(session, rollouts) for session in sessions)
    assert first.fingerprint == second.fingerprint


def test_each_optimiser_step_has_its_own_learning_rate(tiny_model):
    sessions = [session_of(tiny_model), session_of(tiny_model), session_of(tiny_model)]
    rollouts = make_rollouts(sessions[0].policy, version=0)
    for session, rates in zip(sessions, ([0.0, 0.0], [1e-3, 0.0], [0.0, 1e-3]), strict=True):
        learn(session, rollouts, num_iterations=2, learning_rates=rates)
    start = session_of(sessions[0]._model_dir)
    assert checksum(sessions[0].policy.trainable()) == checksum(start.policy.trainable())
    moved = {checksum(session.policy.trainable()) for session in sessions}
    assert len(moved) == 3


# --- what is not trained ---------------------------------------------------------------------------------------------


def test_a_skipped_rollout_gives_the_parameters_of_one_with_advantage_zero(tiny_model):
    forwarded, skipped = session_of(tiny_model), session_of(tiny_model)
    rollouts = make_rollouts(forwarded.policy, version=0)
    flat = [replace(r, advantage=0.0) if number < 2 else r for number, r in enumerate(rollouts)]
    learn(forwarded, flat)
    left_out = [replace(r, skipped=True, micro_batch=-1) if number < 2 else r for number, r in enumerate(flat)]
    learned = learn(skipped, left_out, n_tokens=[sum(len(r.tokens) for r in rollouts)])
    assert_close(parameters(skipped), parameters(forwarded), 1e-6)
    assert learned.fingerprint.losses[0] != 0


def test_where_everything_is_skipped_the_gradient_is_zero_and_the_moments_decay(session):
    rollouts = make_rollouts(session.policy, version=0)
    learn(session, rollouts)
    before, moments = parameters(session), gradients(session)
    learned = learn(session, [replace(r, skipped=True, micro_batch=-1) for r in rollouts])
    assert (learned.fingerprint.losses, learned.fingerprint.grad_norms) == ([0.0], [0.0])
    assert_close(gradients(session), {name: moment * 0.9 for name, moment in moments.items()}, 1e-6)
    assert any(not torch.equal(before[name], now) for name, now in parameters(session).items())
    assert "clip_fraction" not in learned.metrics


def test_a_masked_rollout_is_not_trained_and_counts_in_the_sequences_alone(session):
    rollouts = [replace(r, masked=number == 0) for number, r in enumerate(make_rollouts(session.policy, version=0))]
    settings = step_settings(rollouts)
    assert settings.n_sequences == [6]
    assert settings.n_tokens == [sum(len(r.tokens) for r in rollouts[1:])]
    forwarded = [r.id for batch in micro_batches(as_read(rollouts), 0, session.policy.device) for r in batch.rollouts]
    assert forwarded == [r.id for r in rollouts[1:]]


# --- versions and the proximal policy --------------------------------------------------------------------------------


def test_a_trace_shows_staleness_and_alpha_of_each_token_by_its_own_version(session):
    at_version(session, 4)
    rollouts = make_rollouts(session.policy, version=4)
    rollouts[1] = replace(rollouts[1], skipped=True, micro_batch=-1)
    rollouts[2] = replace(rollouts[2], masked=True)
    own = own_logps(session.policy, rollouts)
    learned = learn(session, rollouts, trace=[r.id for r in rollouts[:4]])
    assert [trace.rollout_id for trace in learned.traces] == [r.id for r in (*(rollouts[i] for i in (0, 3, 1, 2)),)]
    by_id = {r.id: r for r in rollouts}
    for trace in learned.traces:
        made = by_id[trace.rollout_id]
        staleness = [4 - v for v in made.versions]
        alpha = [1 / max(d, 1) for d in staleness]
        prox = [a * lb + (1 - a) * lt for a, lb, lt in zip(alpha, made.logps, own[made.id], strict=True)]
        assert read_ints(trace.staleness) == staleness
        assert read_floats(trace.alpha) == pytest.approx(alpha)
        assert read_floats(trace.policy) == pytest.approx(own[made.id], abs=1e-5)
        assert read_floats(trace.prox) == pytest.approx(prox, abs=1e-5)
        drift = [w * r for w, r in zip(read_floats(trace.weight), read_floats(trace.ratio), strict=True)]
        assert drift == pytest.approx(
            [math.exp(a - b) for a, b in zip(own[made.id], made.logps, strict=True)], rel=1e-4
        )


def test_recompute_anchors_at_the_start_of_the_step_so_one_minibatch_has_ratio_one(session):
    rollouts = make_rollouts(session.policy, version=0)
    learned = learn(session, rollouts, prox_logp_method="recompute", trace=[rollouts[0].id])
    assert learned.metrics["ratio_min"] == learned.metrics["ratio_max"] == 1.0
    assert learned.traces[0].policy == learned.traces[0].prox
    assert learned.metrics["alpha_mean"] == 0.0


def in_two_minibatches(rollouts):
    return [replace(r, minibatch=number // 3) for number, r in enumerate(rollouts)]


def test_recomputed_anchors_stay_where_they_were_over_the_minibatches(session):
    rollouts = in_two_minibatches(make_rollouts(session.policy, version=0))
    own = own_logps(session.policy, rollouts)
    last = rollouts[-1]
    trace = learn(session, rollouts, prox_logp_method="recompute", trace=[last.id]).traces[0]
    assert read_floats(trace.prox) == pytest.approx(own[last.id], abs=1e-5)
    assert read_floats(trace.policy) != pytest.approx(own[last.id], abs=1e-3)


def test_loglinear_anchors_follow_the_policy_from_minibatch_to_minibatch(session):
    at_version(session, 4)
    rollouts = in_two_minibatches(make_rollouts(session.policy, version=4))
    last = replace(rollouts[-1], versions=[2] * len(rollouts[-1].tokens))
    trace = learn(session, [*rollouts[:-1], last], trace=[last.id]).traces[0]
    halfway = [(a + b) / 2 for a, b in zip(read_floats(trace.policy), last.logps, strict=True)]
    assert read_floats(trace.prox) == pytest.approx(halfway, abs=1e-5)


def test_metrics_mode_trains_on_recompute_and_logs_the_interpolation_s_error(tiny_model):
    sessions = [at_version(session_of(tiny_model), 3) for _ in range(2)]
    rollouts = make_rollouts(sessions[0].policy, version=3)
    recompute = learn(sessions[0], rollouts, prox_logp_method="recompute")
    metrics = learn(sessions[1], rollouts, prox_logp_method="metrics")
    assert metrics.fingerprint == recompute.fingerprint
    assert metrics.metrics["prox_error"] > 0
    assert "prox_error" not in recompute.metrics


def test_without_a_proximal_policy_the_weight_is_one(session):
    at_version(session, 3)
    learned = learn(session, make_rollouts(session.policy, version=3), prox_logp_method="none")
    assert learned.metrics["weight_min"] == learned.metrics["weight_max"] == 1.0


def test_the_time_of_the_proximal_step_is_told_apart(session):
    at_version(session, 3)
    rollouts = make_rollouts(session.policy, version=3)
    interpolated = learn(session, rollouts).times
    recomputed = learn(session, rollouts, prox_logp_method="recompute").times
    assert 0 < interpolated["prox_logp"] < recomputed["prox_logp"]
    assert interpolated["learn"] > 0


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_the_distance_to_the_behaviour_policy_is_measured_on_fresh_tokens_and_on_all(session):
    at_version(session, 2)
    rollouts = make_rollouts(session.policy, version=2, seed=5)
    own = own_logps(session.policy, rollouts)
    found = learn(session, rollouts).metrics
    gaps = [(v, abs(a - b)) for r in rollouts for v, a, b in zip(r.versions, own[r.id], r.logps, strict=True)]
    fresh = [gap for v, gap in gaps if v == 2]
    assert found["logp_diff_d0"] == pytest.approx(sum(fresh) / len(fresh), abs=1e-5)
    assert found["logp_diff_mean"] == pytest.approx(sum(gap for _, gap in gaps) / len(gaps), abs=1e-5)
    assert 0 < found["ess"] <= 1
    assert found["kl"] > 0
    assert (found["staleness_min"], found["staleness_max"]) == (0.0, 2.0)


def test_without_a_fresh_token_what_is_measured_on_them_is_absent(session):
    at_version(session, 2)
    stale = [replace(r, versions=[1] * len(r.tokens)) for r in make_rollouts(session.policy, version=2)]
    assert not {"logp_diff_d0", "clip_fraction_d0"} & learn(session, stale).metrics.keys()


def test_entropy_is_the_policy_s_at_the_sampling_temperature(session, tiny_model):
    rollouts = make_rollouts(session.policy, version=0, count=2)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        logps = torch.cat(
            [
                torch.log_softmax(
                    model(torch.tensor([r.prompt + r.tokens])).logits[0, len(r.prompt) - 1 : -1] / TEMPERATURE, -1
                )
                for r in rollouts
            ]
        )
    expected = -(logps.exp() * logps).sum(-1).mean().item()
    assert learn(session, rollouts).metrics["entropy"] == pytest.approx(expected, abs=1e-4)


# --- refusals: nothing is applied ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_recorded_logprob_that_is_no_number_stops_the_step_and_names_the_rollout(session, value):
    rollouts = make_rollouts(session.policy, version=0)
    rollouts[3] = replace(rollouts[3], logps=[*rollouts[3].logps[:-1], value])
    before = fingerprint(session)
    with pytest.raises(NonFiniteError, match=r"recorded log-prob.*103.*not applied") as caught:
        learn(session, rollouts)
    assert caught.value.rollout_ids == (103,)
    assert fingerprint(session) == before
    assert session.loaded().step == 0


def test_a_number_that_is_none_at_a_masked_rollout_is_never_read(session):
    rollouts = make_rollouts(session.policy, version=0)
    rollouts[3] = replace(rollouts[3], logps=[math.nan] * len(rollouts[3].tokens), masked=True)
    assert math.isfinite(learn(session, rollouts).fingerprint.losses[0])


def test_an_infinite_ratio_stops_the_step_and_names_the_rollout(session):
    rollouts = make_rollouts(session.policy, version=0)
    rollouts[2] = replace(rollouts[2], logps=[-500.0] * len(rollouts[2].tokens), advantage=-1.0)
    before = fingerprint(session)
    with pytest.raises(NonFiniteError, match="the loss") as caught:
        learn(session, rollouts)
    assert caught.value.rollout_ids == (102,)
    assert fingerprint(session) == before


def test_a_gradient_that_is_no_number_names_the_minibatch(session):
    rollouts = make_rollouts(session.policy, version=0)
    rollouts[2] = replace(rollouts[2], logps=[-500.0] * len(rollouts[2].tokens), advantage=1.0)  # clipped: finite loss
    before = fingerprint(session)
    with pytest.raises(NonFiniteError, match="gradient") as caught:
        learn(session, rollouts)
    assert caught.value.rollout_ids == tuple(r.id for r in rollouts)
    assert fingerprint(session) == before


def test_a_policy_that_overflows_in_the_second_minibatch_undoes_the_first(session, tiny_model):
    rollouts = in_two_minibatches(make_rollouts(session.policy, version=0))
    before = fingerprint(session)
    with pytest.raises(NonFiniteError, match="the policy's log-prob"):
        learn(session, rollouts, learning_rates=[1e38, 1e-3])
    assert fingerprint(session) == before
    assert learn(session, rollouts).fingerprint == learn(session_of(tiny_model), rollouts).fingerprint


def test_weights_that_an_error_left_between_two_versions_are_used_for_nothing_more(session, monkeypatch):
    rollouts = make_rollouts(session.policy, version=0)

    def fail(_tensors):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("rlhfd.workers.step.checksum", fail)
        with pytest.raises(MemoryError):
            learn(session, rollouts)
    with pytest.raises(RuntimeError, match="load a checkpoint first"):
        learn(session, rollouts)


def test_an_unknown_loss_type_is_refused_by_name(session):
    with pytest.raises(JobFileError, match='loss_type "ppo2"'):
        learn(session, make_rollouts(session.policy, version=0), loss_type="ppo2")


def test_a_kl_term_is_refused_rather_than_left_out(session):
    with pytest.raises(JobFileError, match="beta"):
        learn(session, make_rollouts(session.policy, version=0), beta=0.1)


@pytest.mark.parametrize(
    "change", [{"tokens": [9999] * 3}, {"prompt": []}, {"logps": [0.0]}, {"minibatch": -1}], ids=lambda c: next(iter(c))
)
def test_a_rollout_that_does_not_fit_the_model_is_refused(session, change):
    rollouts = make_rollouts(session.policy, version=0)
    rollouts[0] = replace(rollouts[0], **change)
    if "tokens" in change:
        rollouts[0] = replace(rollouts[0], logps=[-1.0] * 3, versions=[0] * 3)
    with pytest.raises(ValueError, match="rollout 100"):
        learn(session, rollouts)


def test_a_step_out_of_order_is_refused(session):
    rollouts = make_rollouts(session.policy, version=0)
    with pytest.raises(ValueError, match="step 2 from version 1 asked of version 0"):
        session.learn(learn_frame(rollouts, step=2), group_frames(rollouts))
