"""The learning rate as a pure function of the step; nothing to checkpoint."""

from math import cos, pi
from typing import Literal, TypeAlias, assert_never

ScheduleKind: TypeAlias = Literal["constant", "linear", "cosine", "constant_with_warmup"]


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    max_steps: int,
    kind: ScheduleKind,
    min_ratio: float = 0.0,
) -> float:
    """Learning rate of step `step`, counted from 1 to `max_steps`, as transformers' `get_scheduler` has the kinds.

    Warm-up: peak * step / warmup_steps up to and including step `warmup_steps` (`constant` has none). transformers
    starts one step lower, at 0, which would waste the first step. After it the two are equal: step s takes the factor
    of s - 1, so with warmup_steps = 0 step 1 takes the peak, and the last step of a decay is small but not 0.
    `min_ratio`: where a decay would end, as a share of the peak (transformers' `min_lr_rate`).
    Raises ValueError for a step outside 1..max_steps.
    """
    if not 1 <= step <= max_steps:
        raise ValueError(f"step {step} is outside 1..{max_steps}")
    if kind == "constant":
        return peak
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - 1 - warmup_steps) / (max_steps - warmup_steps)
    return peak * (min_ratio + (1.0 - min_ratio) * _factor(kind, progress))


def _factor(kind: Literal["linear", "cosine", "constant_with_warmup"], progress: float) -> float:
    """Share of the way from the end of the decay to the peak; `progress` in [0, 1)."""
    match kind:
        case "constant_with_warmup":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + cos(pi * progress))
        case _:
            assert_never(kind)
