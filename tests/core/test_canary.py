"""Is what the engine serves what was trained? Arithmetic over a few log-probs."""

from array import array

import pytest

from rlhfd.core.canary import FLOOR, RESPONSE, SLACK, distance, follows, near, tolerance


def canary(*values: float) -> list[bytes]:
    return [array("f", values).tobytes()]


def test_the_distance_is_mean_and_maximum_over_all_tokens_of_all_sequences():
    a, b = canary(-1.0, -2.0) + canary(-3.0), canary(-1.5, -2.0) + canary(-4.0)
    found = distance(a, b)
    assert (found.mean, found.max) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [([], []), (canary(), canary()), (canary(1.0), canary(1.0, 2.0)), (canary(1.0), canary(1.0) + canary(2.0))],
)
def test_canaries_of_another_shape_or_empty_ones_are_refused(a, b):
    with pytest.raises(ValueError, match=r"empty|argument"):
        distance(a, b)


def test_the_tolerance_is_three_times_the_noise_but_never_below_what_float32_reaches():
    assert tolerance(0.04) == pytest.approx(0.12)
    assert tolerance(0.0) == tolerance(FLOOR / SLACK / 2) == FLOOR


def test_near_is_by_the_mean():
    reference = canary(0.0, 0.0)
    assert near(canary(0.0, 0.2), reference, noise=0.04)
    assert not near(canary(0.2, 0.2), reference, noise=0.04)


@pytest.mark.parametrize("noise", [0.0, 0.04, float("nan")])
def test_nan_is_never_near(noise):
    assert not near(canary(float("nan")), canary(0.0), noise)


def test_a_noise_that_is_no_number_lets_nothing_through():
    assert not near(canary(0.0), canary(1.0), float("nan"))


class TestFollowing:
    """(before, after) of the engine and of the learner, under a probe that moves the learner by 1."""

    LEARNER = (canary(0.0, 0.0), canary(1.0, 1.0))

    def test_an_engine_that_moves_along_and_arrives_follows(self):
        assert follows((canary(0.01, 0.0), canary(1.0, 1.01)), self.LEARNER, noise=0.01)

    def test_one_that_stays_does_not(self):
        assert not follows((canary(0.0, 0.0), canary(0.0, 0.0)), self.LEARNER, noise=0.01)

    def test_one_that_moves_elsewhere_does_not(self):
        assert not follows((canary(0.0, 0.0), canary(-1.0, -1.0)), self.LEARNER, noise=0.01)

    def test_one_that_was_there_before_does_not(self):
        """It did not move by half of what the learner did: the load was not what brought it there."""
        assert RESPONSE == 0.5
        assert not follows((canary(0.6, 0.6), canary(1.0, 1.0)), self.LEARNER, noise=0.01)

    def test_a_probe_that_moves_nothing_proves_nothing(self):
        still = (canary(0.0), canary(0.0))
        assert not follows(still, still, noise=0.01)

    def test_nan_does_not_follow(self):
        assert not follows((canary(float("nan")), canary(1.0)), (canary(0.0), canary(1.0)), noise=0.01)
        assert not follows((canary(0.0), canary(float("nan"))), (canary(0.0), canary(1.0)), noise=0.01)
