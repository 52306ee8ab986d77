"""The metrics of a step, one table: what `metrics`, trackers, benches and charts show, with units.

`side` says who computes it: the daemon from its tables (most of them in `summarise`), or the learner from tensors
(`wire.Learned.metrics`, and `times` for `time.prox_logp` and `time.learn`). A name that ends in `.*` is a family: one
metric per reward or per number of steps. `time.*` are one object `time` in JSON.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, stdev
from typing import Literal, NamedTuple, TypeAlias

from rlhfd.core.overlap import staleness
from rlhfd.core.types import Ordinal, VersionStep

Unit: TypeAlias = Literal["1", "steps", "tokens", "groups", "rollouts", "reward", "nats", "seconds", "share"]


class Metric(NamedTuple):
    """One line of the table; `when` names the setting without which the metric is absent."""

    name: str
    unit: Unit
    side: Literal["daemon", "learner"]
    meaning: str
    when: str = ""


METRICS: tuple[Metric, ...] = (
    Metric("step", "1", "daemon", "number of the step, from 1; it makes the version of the same number"),
    Metric("version", "1", "daemon", "step number of the version that the step starts from"),
    Metric("reward_mean", "reward", "daemon", "mean reward over the scored rollouts"),
    Metric("reward_std", "reward", "daemon", "unbiased standard deviation of the reward over the scored rollouts"),
    Metric("reward_mean.*", "reward", "daemon", "the same mean for one reward by its name, before its weight"),
    Metric("reward_std.*", "reward", "daemon", "the same deviation for one reward by its name, before its weight"),
    Metric("unscored_rollouts", "rollouts", "daemon", "rollouts left out because a reward gave no number"),
    Metric("dropped_groups", "groups", "daemon", "groups dropped since the step before"),
    Metric("zero_advantage_groups", "groups", "daemon", "groups whose scored rollouts all have the same reward"),
    Metric("completion_length_mean", "tokens", "daemon", "mean length of the completions"),
    Metric("completion_length_max", "tokens", "daemon", "longest completion"),
    Metric("truncated_fraction", "share", "daemon", "share of the rollouts that ended by length"),
    Metric("corr_length_staleness", "1", "daemon", "correlation of a rollout's length with its mean staleness"),
    Metric("staleness_min", "steps", "daemon", "least staleness of a token: version of the step minus the token's own"),
    Metric("staleness_mean", "steps", "daemon", "mean staleness over the tokens"),
    Metric("staleness_max", "steps", "daemon", "greatest staleness of a token"),
    Metric("staleness_share.*", "share", "daemon", "share of the tokens with just this staleness"),
    Metric("overcommit", "groups", "daemon", "groups admitted beyond groups_per_step"),
    Metric("chunk_tokens", "tokens", "daemon", "tokens per streamed chunk; 0 without streaming"),
    Metric("tokens_generated", "tokens", "daemon", "completion tokens committed since the step before"),
    Metric("learning_rate", "1", "daemon", "of the step's last optimiser step"),
    Metric("loss", "1", "learner", "mean over the optimiser steps"),
    Metric("grad_norm", "1", "learner", "mean over the optimiser steps, before clipping"),
    Metric("clip_fraction", "share", "learner", "share of tokens whose gradient the clip took"),
    Metric("clip_fraction_low", "share", "learner", "the part of it below the band, at a negative advantage"),
    Metric("clip_fraction_high", "share", "learner", "the part of it above the band, at a positive advantage"),
    Metric(
        "clip_fraction_d0",
        "share",
        "learner",
        "clipped share of fresh tokens, first minibatch: mismatch",
        "fresh tokens",
    ),
    Metric(
        "logp_diff_mean", "nats", "learner", "mean |policy - behaviour| log-prob, all tokens, at the start of the step"
    ),
    Metric(
        "logp_diff_d0", "nats", "learner", "the same over fresh tokens: weights out of step show here", "fresh tokens"
    ),
    Metric("kl", "nats", "learner", "mean of exp(x) - 1 - x, x = policy - behaviour log-prob"),
    Metric("kl_reference", "nats", "learner", "the same against the reference model", "beta > 0"),
    Metric("entropy", "nats", "learner", "mean entropy of the policy per token"),
    Metric("alpha_mean", "1", "learner", "mean interpolation weight of the proximal policy (A-3PO)"),
    Metric("weight_min", "1", "learner", "least behaviour weight w, before the cap"),
    Metric("weight_mean", "1", "learner", "mean behaviour weight w, before the cap"),
    Metric("weight_max", "1", "learner", "greatest behaviour weight w, before the cap"),
    Metric("weight_capped_fraction", "share", "learner", "share of the tokens whose w the cap changed"),
    Metric("ratio_min", "1", "learner", "least ratio r of policy to proximal policy"),
    Metric("ratio_mean", "1", "learner", "mean ratio r"),
    Metric("ratio_max", "1", "learner", "greatest ratio r"),
    Metric("ess", "share", "learner", "effective sample size of exp(policy - behaviour), as a share of the tokens"),
    Metric(
        "prox_error",
        "nats",
        "learner",
        "mean |loglinear - recomputed| proximal log-prob",
        'prox_logp_method = "metrics"',
    ),
    Metric("time.total", "seconds", "daemon", "from the step before's end to this one's"),
    Metric("time.wait_rollouts", "seconds", "daemon", "the learner idle while a group it needs was generated"),
    Metric("time.wait_scores", "seconds", "daemon", "the learner idle while only scores were missing"),
    Metric("time.prox_logp", "seconds", "learner", "making the proximal log-probs"),
    Metric("time.learn", "seconds", "learner", "forward, backward and optimiser"),
    Metric("time.publish", "seconds", "daemon", "from trained to served by the generator"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFacts:
    """What the tables say of one rollout of a step.

    reward: None where a reward gave no number; parts: by the reward's name, before its weight; tokens: how many were
    sampled under which version, as (version step, tokens); truncated: it ended by length.
    """

    group: Ordinal
    reward: float | None
    parts: Mapping[str, float]
    tokens: tuple[tuple[VersionStep, int], ...]
    truncated: bool

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return sum(n for _, n in self.tokens)


def summarise(rollouts: Sequence[RolloutFacts], *, version: VersionStep) -> dict[str, float]:
    """The daemon-side metrics that follow from a step's rollouts; `version` is the one that the step starts from.

    Raises ValueError for a step without a scored rollout or without a token: such a step is never planned.
    """
    scored = [r.reward for r in rollouts if r.reward is not None]
    if not scored or not any(r.length for r in rollouts):
        raise ValueError("a step without a scored rollout or without a token has no metrics")
    return {
        "version": version,
        "reward_mean": fmean(scored),
        "reward_std": _spread(scored),
        **_parts(rollouts),
        "unscored_rollouts": len(rollouts) - len(scored),
        "zero_advantage_groups": _flat_groups(rollouts),
        "completion_length_mean": fmean(r.length for r in rollouts),
        "completion_length_max": max(r.length for r in rollouts),
        "truncated_fraction": fmean(r.truncated for r in rollouts),
        "corr_length_staleness": _length_staleness(rollouts, version),
        **_staleness(rollouts, version),
    }


def _spread(values: Sequence[float]) -> float:
    """Unbiased standard deviation; 0 of a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def _parts(rollouts: Sequence[RolloutFacts]) -> dict[str, float]:
    """Mean and deviation of each reward by name, over the rollouts that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.parts.items():
            values[name].append(value)
    means = {f"reward_mean.{name}": fmean(v) for name, v in values.items()}
    return means | {f"reward_std.{name}": _spread(v) for name, v in values.items()}


def _flat_groups(rollouts: Sequence[RolloutFacts]) -> int:
    """Groups in which no scored rollout differs from another in reward."""
    rewards: defaultdict[Ordinal, set[float]] = defaultdict(set)
    for rollout in rollouts:
        if rollout.reward is not None:
            rewards[rollout.group].add(rollout.reward)
    return sum(len(distinct) == 1 for distinct in rewards.values())


def _staleness(rollouts: Sequence[RolloutFacts], version: VersionStep) -> dict[str, float]:
    """Least, mean, greatest staleness over the tokens, and the share of each."""
    tokens: Counter[int] = Counter()
    for rollout in rollouts:
        for sampled, n in rollout.tokens:
            tokens[staleness(sampled, version)] += n
    total = tokens.total()
    return {
        "staleness_min": min(tokens),
        "staleness_mean": sum(d * n for d, n in tokens.items()) / total,
        "staleness_max": max(tokens),
        **{f"staleness_share.{d}": n / total for d, n in sorted(tokens.items())},
    }


def _length_staleness(rollouts: Sequence[RolloutFacts], version: VersionStep) -> float:
    """Pearson's correlation over the rollouts that have tokens; 0 where either does not vary."""
    sampled = [r for r in rollouts if r.length]
    stale = [sum(staleness(v, version) * n for v, n in r.tokens) / r.length for r in sampled]
    try:
        return correlation([float(r.length) for r in sampled], stale)
    except StatisticsError:  # fewer than two, or one of the two constant
        return 0.0


STABLE: tuple[str, ...] = (
    "step",
    "version",
    "reward_mean",
    "reward_std",
    "completion_length_mean",
    "completion_length_max",
    "staleness_mean",
    "staleness_max",
    "loss",
    "grad_norm",
    "clip_fraction",
    "logp_diff_mean",
    "overcommit",
    "chunk_tokens",
    "tokens_generated",
    "time",
)
"""Keys that every row of `metrics --json` has, whatever the release; null where a step has no such number."""


def whole(row: Mapping[str, object]) -> dict[str, object]:
    """The row with every stable key, those first; a step in which nothing was forwarded has no clip fraction, say."""
    return {**dict.fromkeys(STABLE), **row}
