"""From rewards to advantages: within a group (GRPO, RLOO and their kin) and along a completion (PPO's GAE).

Plain floats in float64; what comes out is recorded with the step and used again by a replay.
"""

from collections.abc import Sequence
from math import isfinite
from statistics import fmean, stdev
from typing import Literal, TypeAlias, assert_never

Scale: TypeAlias = Literal["group", "none", "leave_one_out"]

STD_FLOOR = 1e-4  # added to the standard deviation, as TRL does


def group_advantages(rewards: Sequence[float], scale: Scale = "group", std: float | None = None) -> list[float]:
    """Advantage of each scored rollout of one group, [G] -> [G].

    `group`: (R - mean) / (std + 1e-4) with the group's unbiased std, or with `std` where the whole batch's is wanted.
    `none`: R - mean (dr_grpo). `leave_one_out`: R minus the mean of the others (rloo).
    Equal rewards (max == min) give exactly 0.0; rounding in the mean would otherwise leave 1e-17 / 1e-4 behind.
    Raises ValueError on a reward that is no finite number, and on `std` where nothing is divided by it.
    """
    if not all(map(isfinite, rewards)):
        raise ValueError(f"a reward of a group is not finite: {list(rewards)}")
    if std is not None and scale != "group":
        raise ValueError(f"a standard deviation has no use with scale {scale!r}")
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    factor = _factor(rewards, scale, std)
    return [(reward - mean) * factor for reward in rewards]


def _factor(rewards: Sequence[float], scale: Scale, std: float | None) -> float:
    """What the centred rewards are multiplied by."""
    match scale:
        case "group":
            return 1.0 / ((stdev(rewards) if std is None else std) + STD_FLOOR)
        case "none":
            return 1.0
        case "leave_one_out":
            return len(rewards) / (len(rewards) - 1)
        case _:
            assert_never(scale)


def gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over one completion: [T], [T] -> advantages, returns.

    `values[t]` is the critic's value before token t, `bootstrap` the value after the last one: 0 for a completion that
    was scored, also where it ended by length. Returns are advantages + values. Raises ValueError on unequal lengths.
    """
    if len(rewards) != len(values):
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values of one completion")
    advantages = [0.0] * len(rewards)
    running, following = 0.0, bootstrap
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
