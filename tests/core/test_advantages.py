"""Advantages agree with reference vectors, and flat groups give exactly nothing."""

import json
from math import inf, nan
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.core.advantages import gae, group_advantages

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "advantages.json").read_text("utf-8"))
REWARDS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16)


@pytest.mark.parametrize("case", VECTORS["group"], ids=lambda case: f"{len(case['rewards'])} rewards")
@pytest.mark.parametrize("scale", ["group", "none", "leave_one_out"])
def test_group_advantages_agree_with_the_vectors(case, scale):
    assert group_advantages(case["rewards"], scale) == pytest.approx(case[scale], abs=1e-6, rel=0)


@pytest.mark.parametrize("case", VECTORS["gae"], ids=lambda case: f"gamma {case['gamma']} lam {case['lam']}")
def test_gae_agrees_with_the_vectors(case):
    advantages, returns = gae(case["rewards"], case["values"], gamma=case["gamma"], lam=case["lam"])
    assert advantages == pytest.approx(case["advantages"], abs=1e-6, rel=0)
    assert returns == pytest.approx(case["returns"], abs=1e-6, rel=0)


@pytest.mark.parametrize("scale", ["group", "none", "leave_one_out"])
@given(reward=st.floats(-1e6, 1e6), count=st.integers(1, 16))
def test_equal_rewards_give_exactly_zero(scale, reward, count):
    assert group_advantages([reward] * count, scale) == [0.0] * count


def test_the_zeros_of_equal_rewards_do_not_come_from_the_mean():
    rewards = [0.7] * 3
    assert fmean(rewards) != 0.7  # off by one unit in the last place, which a small std would blow up
    assert group_advantages(rewards) == [0.0] * 3
    assert group_advantages(rewards, std=1e-9) == [0.0] * 3


def test_the_std_of_the_batch_replaces_that_of_the_group():
    assert group_advantages([0.0, 2.0], "group", std=0.5) == pytest.approx([-1 / 0.5001, 1 / 0.5001])


def test_the_std_is_unbiased():
    assert group_advantages([0.0, 2.0])[1] == pytest.approx(1 / (2**0.5 + 1e-4))


@given(rewards=REWARDS)
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards):
    expected = [r - fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_reward_that_is_no_finite_number_is_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, bad])


@pytest.mark.parametrize("scale", ["none", "leave_one_out"])
def test_a_std_that_nothing_is_divided_by_is_refused(scale):
    with pytest.raises(ValueError, match="standard deviation has no use"):
        group_advantages([1.0, 2.0], scale, std=1.0)


def test_an_empty_group_has_no_advantages():
    assert group_advantages([]) == []


@given(
    rows=st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=30),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    bootstrap=st.floats(-10, 10),
)
def test_gae_is_the_discounted_sum_of_the_temporal_differences(rows, gamma, lam, bootstrap):
    rewards, values = [r for r, _ in rows], [v for _, v in rows]
    nexts = [*values[1:], bootstrap]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, nexts, strict=True)]
    expected = [sum((gamma * lam) ** (i - t) * deltas[i] for i in range(t, len(deltas))) for t in range(len(deltas))]
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam, bootstrap=bootstrap)
    assert advantages == pytest.approx(expected, abs=1e-9)
    assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], abs=1e-9)


def test_the_bootstrap_stands_in_for_the_value_after_the_last_token():
    assert gae([1.0], [0.5], gamma=0.9, lam=0.95, bootstrap=2.0) == ([pytest.approx(2.3)], [pytest.approx(2.8)])
    assert gae([1.0], [0.5], gamma=0.9, lam=0.95) == ([0.5], [1.0])


def test_gae_refuses_unequal_lengths_and_takes_an_empty_completion():
    with pytest.raises(ValueError, match="1 rewards and 2 values"):
        gae([1.0], [1.0, 2.0], gamma=1.0, lam=1.0)
    assert gae([], [], gamma=1.0, lam=1.0) == ([], [])
