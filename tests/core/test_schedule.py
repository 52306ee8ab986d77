"""The learning rate follows transformers' schedules, except that no step is wasted at zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.core.schedule import learning_rate

KINDS = ["constant", "linear", "cosine", "constant_with_warmup"]
DECAYS = ["linear", "cosine"]


def rates(kind: str, warmup: int, steps: int, min_ratio: float = 0.0) -> list[float]:
    return [
        learning_rate(s, peak=2.0, warmup_steps=warmup, max_steps=steps, kind=kind, min_ratio=min_ratio)
        for s in range(1, steps + 1)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_without_warm_up_the_first_step_takes_the_peak(kind):
    assert rates(kind, 0, 10)[0] == 2.0


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_warm_up_rises_to_the_peak_at_its_last_step(kind):
    assert rates(kind, 4, 10)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_constant_is_constant_with_no_warm_up():
    assert rates("constant", 4, 6) == [2.0] * 6


def test_decays_by_hand():
    assert rates("linear", 0, 4) == [2.0, 1.5, 1.0, 0.5]
    assert rates("cosine", 0, 4) == pytest.approx([2.0, 1 + 2**-0.5, 1.0, 1 - 2**-0.5])
    assert rates("constant_with_warmup", 2, 5) == [1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", DECAYS)
@given(warmup=st.integers(0, 20), rest=st.integers(1, 100), min_ratio=st.floats(0, 1))
def test_a_decay_falls_and_stays_over_its_end(kind, warmup, rest, min_ratio):
    decay = rates(kind, warmup, warmup + rest, min_ratio)[warmup:]
    assert decay == sorted(decay, reverse=True)
    assert all(rate >= 2.0 * min_ratio - 1e-12 for rate in decay)
    assert decay[-1] > 0


def test_a_warm_up_as_long_as_the_run_never_decays():
    assert rates("linear", 4, 4) == [0.5, 1.0, 1.5, 2.0]
    assert rates("cosine", 8, 4) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("step", [0, 11, -1])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match=r"outside 1\.\.10"):
        learning_rate(step, peak=1.0, warmup_steps=0, max_steps=10, kind="linear")


# get_scheduler of transformers 5.19, learning rate 2.0 before each of 8 optimiser steps, by (kind, warm-up steps)
TRANSFORMERS = {
    ("linear", 0): [2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25],
    ("linear", 3): [0.0, 0.6666666667, 1.3333333333, 2.0, 1.6, 1.2, 0.8, 0.4],
    ("cosine", 0): [2.0, 1.9238795325, 1.7071067812, 1.3826834324, 1.0, 0.6173165676, 0.2928932188, 0.0761204675],
    ("cosine", 3): [0.0, 0.6666666667, 1.3333333333, 2.0, 1.8090169944, 1.3090169944, 0.6909830056, 0.1909830056],
    ("constant_with_warmup", 0): [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
    ("constant_with_warmup", 3): [0.0, 0.6666666667, 1.3333333333, 2.0, 2.0, 2.0, 2.0, 2.0],
}


@pytest.mark.parametrize(("kind", "warmup"), TRANSFORMERS)
def test_the_rates_are_those_of_transformers_one_step_ahead_in_warm_up(kind, warmup):
    theirs, ours = TRANSFORMERS[kind, warmup], rates(kind, warmup, 8)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], abs=1e-9)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], abs=1e-9)
