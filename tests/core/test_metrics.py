"""The metrics table is complete, and the daemon's half of it follows from the tables alone."""

from statistics import correlation, stdev

import pytest

from rlhfd.core.metrics import METRICS, STABLE, RolloutFacts, summarise, whole
from rlhfd.core.types import Ordinal, VersionStep


def facts(group: int, reward: float | None, *tokens: tuple[int, int], truncated: bool = False, **parts) -> RolloutFacts:
    return RolloutFacts(
        group=Ordinal(group),
        reward=reward,
        parts=parts,
        tokens=tuple((VersionStep(v), n) for v, n in tokens),
        truncated=truncated,
    )


STEP = [
    facts(0, 1.0, (4, 10), format=1.0, answer=1.0),
    facts(0, 0.0, (3, 5), (4, 15), format=0.0, answer=0.0),
    facts(1, 0.5, (2, 30), truncated=True, format=1.0, answer=0.0),
    facts(1, 0.5, (5, 20), format=1.0, answer=0.0),
    facts(1, None, (4, 20), format=1.0),
]


TIMES = {f"time.{name}" for name in ("total", "wait_rollouts", "wait_scores", "prox_logp", "learn", "publish")}


def test_the_names_that_users_rely_on_are_in_the_table():
    assert {metric.name for metric in METRICS} >= {*STABLE, *TIMES} - {"time"}


def test_a_name_is_listed_once_and_says_what_it_is():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(len(metric.meaning) > 5 and not metric.meaning.endswith(".") for metric in METRICS)


def test_what_is_summarised_is_listed_as_the_daemons():
    listed = {metric.name for metric in METRICS if metric.side == "daemon"}
    families = tuple(name.removesuffix("*") for name in listed if name.endswith(".*"))
    assert all(name in listed or name.startswith(families) for name in summarise(STEP, version=VersionStep(4)))


def test_a_step_by_hand():
    assert summarise(STEP, version=VersionStep(4)) == pytest.approx(
        {
            "version": 4,
            "reward_mean": 0.5,
            "reward_std": stdev([1.0, 0.0, 0.5, 0.5]),
            "reward_mean.format": 0.8,
            "reward_mean.answer": 0.25,
            "reward_std.format": stdev([1, 0, 1, 1, 1]),
            "reward_std.answer": 0.5,
            "unscored_rollouts": 1,
            "zero_advantage_groups": 1,
            "completion_length_mean": 20.0,
            "completion_length_max": 30,
            "truncated_fraction": 0.2,
            "corr_length_staleness": correlation([10, 20, 30, 20, 20], [0, 0.25, 2, 0, 0]),
            "staleness_min": 0,
            "staleness_mean": 0.65,
            "staleness_max": 2,
            "staleness_share.0": 0.65,
            "staleness_share.1": 0.05,
            "staleness_share.2": 0.3,
        }
    )


def test_a_single_rollout_has_no_spread_and_no_correlation():
    out = summarise([facts(0, 1.0, (0, 5), answer=1.0)], version=VersionStep(0))
    assert (out["reward_std"], out["reward_std.answer"], out["corr_length_staleness"]) == (0.0, 0.0, 0.0)


def test_rewards_that_differ_by_rounding_alone_are_no_zero_advantage_group():
    out = summarise([facts(0, 0.3, (0, 5)), facts(0, 0.1 + 0.2, (0, 5))], version=VersionStep(0))
    assert out["zero_advantage_groups"] == 0


@pytest.mark.parametrize("step", [[], [facts(0, None, (0, 5))], [facts(0, 1.0)]])
def test_a_step_that_cannot_be_has_no_metrics(step):
    with pytest.raises(ValueError, match="has no metrics"):
        summarise(step, version=VersionStep(0))


def test_a_row_has_every_stable_key_and_null_where_there_is_no_number():
    row = whole({"step": 3, "entropy": 1.5})
    assert list(row)[: len(STABLE)] == list(STABLE)
    assert (row["step"], row["entropy"], row["clip_fraction"]) == (3, 1.5, None)
