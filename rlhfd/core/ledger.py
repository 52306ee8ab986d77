"""What a step is, before it is learned: the pure half of the redo log.

`draft` turns the groups of the next step into the record that `store.steps` writes: advantages (float64), who is
skipped or masked, the layout in minibatches and micro-batches, N and T, and every value in force. The learner does
what the record says, the first time and at every replay, and decides nothing itself.

Sources: advantages and denominators as TRL has them; the skip changes no gradient, since what it leaves out is zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isclose
from statistics import stdev

from rlhfd.config import JobConfig
from rlhfd.core.advantages import group_advantages
from rlhfd.core.batch import Place, Sized, layout
from rlhfd.core.schedule import learning_rate
from rlhfd.core.types import Group, GroupId, Rollout, RolloutId, StepRollout
from rlhfd.core.wire import Fingerprint, StepSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """One step, ready to be recorded. `rollouts` in training order: ordinal, then k; only scored ones."""

    seed: int
    settings: StepSettings
    groups: tuple[GroupId, ...]
    rollouts: tuple[StepRollout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A scored rollout on its way into the record. `length`: prompt and completion, tokens."""

    group: Group
    rollout: Rollout
    advantage: float
    length: int
    masked: bool

    @property
    def skipped(self) -> bool:
        """Nothing reaches it: not forwarded, but in N, T, the permutation and the reward's deviation."""
        return self.advantage == 0.0 or self.masked


def draft(groups: Sequence[Group], prompt_lengths: Mapping[int, int], config: JobConfig, step: int) -> Draft:
    """The record of step `step` over these groups, in this order. `prompt_lengths`: tokens by snapshot row."""
    members = list(_members(groups, prompt_lengths, config))
    minibatches = min(config.algorithm.minibatches, len({m.group.ordinal for m in members}))
    seed = step_seed(config.job.seed, step)
    places = layout(
        [Sized(id=m.rollout.id, group=m.group.ordinal, length=m.length, skipped=m.skipped) for m in members],
        minibatches=minibatches,
        tokens_per_micro_batch=config.learner.tokens_per_micro_batch,
        seed=seed,
    )
    return Draft(
        seed=seed,
        settings=_settings(members, places, config, step, minibatches),
        groups=tuple(group.id for group in groups),
        rollouts=tuple(_record(member, places[member.rollout.id]) for member in members),
    )


def step_seed(job_seed: int, step: int) -> int:
    """Seed of the permutation of a step, [0, 2**31)."""
    digest = blake2b(f"rlhfd step {job_seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def _members(groups: Sequence[Group], prompt_lengths: Mapping[int, int], config: JobConfig) -> Iterable[_Member]:
    scored = [[r for r in group.rollouts if r.reward is not None] for group in groups]
    advantages = _advantages([[_reward(r) for r in rollouts] for rollouts in scored], config)
    for group, rollouts, values in zip(groups, scored, advantages, strict=True):
        for rollout, advantage in zip(rollouts, values, strict=True):
            yield _Member(
                group=group,
                rollout=rollout,
                advantage=advantage,
                length=prompt_lengths[group.row] + rollout.n_tokens,
                masked=config.algorithm.mask_truncated_completions and rollout.finish == "length",
            )


def _reward(rollout: Rollout) -> float:
    if rollout.reward is None:
        raise ValueError(f"rollout {rollout.id} has no reward")
    return rollout.reward


def _advantages(rewards: Sequence[Sequence[float]], config: JobConfig) -> list[list[float]]:
    """Per group, by `scale_rewards`: group | batch (unbiased std of all raw rewards of the step) | none."""
    match config.algorithm.scale_rewards:
        case "none":
            return [group_advantages(group, "none") for group in rewards]
        case "batch":
            everything = [reward for group in rewards for reward in group]
            std = stdev(everything) if len(everything) > 1 else 0.0
            return [group_advantages(group, "group", std) for group in rewards]
        case _:
            return [group_advantages(group, "group") for group in rewards]


def _record(member: _Member, place: Place) -> StepRollout:
    return StepRollout(
        rollout_id=member.rollout.id,
        group_id=member.group.id,
        advantage=member.advantage,
        minibatch=place.minibatch,
        micro_batch=place.micro_batch,
        masked=member.masked,
        skipped=member.skipped,
    )


def _settings(
    members: Sequence[_Member], places: Mapping[RolloutId, Place], config: JobConfig, step: int, minibatches: int
) -> StepSettings:
    algorithm, learner = config.algorithm, config.learner
    sequences, tokens = [0] * minibatches, [0] * minibatches
    for member in members:
        place = places[member.rollout.id]
        sequences[place.minibatch] += 1
        tokens[place.minibatch] += 0 if member.masked else member.rollout.n_tokens
    rate = learning_rate(
        step,
        peak=learner.learning_rate,
        warmup_steps=learner.warmup_steps,
        max_steps=config.job.max_steps,
        kind=learner.lr_scheduler_type,
    )
    return StepSettings(
        loss_type=algorithm.loss_type,
        prox_logp_method=algorithm.prox_logp_method if algorithm.use_decoupled_loss else "none",
        zero_staleness=algorithm.zero_staleness,
        epsilon=algorithm.epsilon,
        epsilon_high=algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high,
        delta=algorithm.delta,
        behave_weight_cap=algorithm.behave_weight_cap,
        behave_weight_mode=algorithm.behave_weight_mode,
        temperature=config.rollout.temperature,
        max_grad_norm=learner.max_grad_norm,
        learning_rates=[rate] * (minibatches * algorithm.num_iterations),
        minibatches=minibatches,
        num_iterations=algorithm.num_iterations,
        n_sequences=sequences,
        n_tokens=tokens,
        max_completion_length=config.rollout.max_completion_length,
        beta=algorithm.beta,
    )


LOSS_TOLERANCE = 1e-3  # relative, on a GPU
NORM_TOLERANCE = 1e-2


def reproduces(recorded: Fingerprint, replayed: Fingerprint, *, exact: bool) -> bool:
    """Whether a replay made the recorded step again: bit for bit on CPU, within the stated tolerances on a GPU."""
    if exact:
        return recorded == replayed
    return (
        _close(recorded.losses, replayed.losses, LOSS_TOLERANCE)
        and _close(recorded.grad_norms, replayed.grad_norms, NORM_TOLERANCE)
        and recorded.skipped == replayed.skipped
    )


def _close(a: Sequence[float], b: Sequence[float], tolerance: float) -> bool:
    return len(a) == len(b) and all(isclose(x, y, rel_tol=tolerance, abs_tol=1e-9) for x, y in zip(a, b, strict=True))
