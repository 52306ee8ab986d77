"""The few rollouts a step that outlive retention: text, tokens, labels, and what the learner used per token."""

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from rlhfd.core.types import Group, Rollout, RolloutId, Step
from rlhfd.core.wire import TokenTrace
from rlhfd.pipeline.context import Context
from rlhfd.store import chunks, groups

SAMPLES = 4  # rollouts a step
Samples: TypeAlias = dict[RolloutId, dict[str, Any]]


def worth_showing(chosen: Sequence[Group]) -> list[RolloutId]:
    """Those with most versions and resumes first (a continued one is the rare case), then best, worst and longest."""
    scored = [r for group in chosen for r in group.rollouts if r.reward is not None]
    if not scored:
        return []
    mixed = sorted((r for r in scored if _span(r) or r.resumes), key=lambda r: (-_span(r), -r.resumes, r.id))
    best = max(scored, key=_reward)
    worst = min(scored, key=_reward)
    longest = max(scored, key=lambda r: r.n_tokens)
    ids = [r.id for r in (*mixed[: SAMPLES - 1], best, worst, longest, *scored)]
    return list(dict.fromkeys(ids))[:SAMPLES]


def _span(rollout: Rollout) -> int:
    if rollout.min_step is None or rollout.max_step is None:
        return 0
    return rollout.max_step - rollout.min_step


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.reward is None else rollout.reward


async def describe(context: Context, step: Step, traces: Sequence[TokenTrace]) -> Samples:
    """One JSON object a traced rollout, as `rlhfd samples` shows it; per-token lists have one entry a token."""
    if not traces:
        return {}
    found = await groups.groups(context.db, step.groups)
    data = await chunks.rollout_data(context.db, step.groups)
    uses = {use.rollout_id: use for use in step.rollouts}
    places = {r.id: (group, r) for group in found for r in group.rollouts}
    shown: Samples = {}
    for trace in traces:
        rollout_id = RolloutId(trace.rollout_id)
        group, rollout = places[rollout_id]
        stored = data[rollout_id]
        shown[rollout_id] = {
            "step": step.n,
            "rollout": rollout_id,
            "ordinal": group.ordinal,
            "k": rollout.k,
            "prompt": context.snapshot.row(group.row).text,
            "completion": rollout.text,
            "finish": rollout.finish,
            "resumes": rollout.resumes,
            "reward": rollout.reward,
            "reward_parts": rollout.parts,
            "advantage": uses[rollout_id].advantage,
            "tokens": _ints(stored.tokens),
            "version_steps": _ints(stored.versions),
            "behaviour_logps": _floats(stored.logps),
            "staleness": _ints(trace.staleness),
            "alpha": _floats(trace.alpha),
            "policy_logps": _floats(trace.policy),
            "proximal_logps": _floats(trace.prox),
            "weight": _floats(trace.weight),
            "ratio": _floats(trace.ratio),
        }
    return shown


def _ints(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return values.tolist()


def _floats(data: bytes) -> list[float]:
    values = array("f")
    values.frombytes(data)
    return values.tolist()
