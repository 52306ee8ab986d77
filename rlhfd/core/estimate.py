"""What follows from a job file before anything runs: how long, how many tokens, how stale, how much memory.

Counts are exact, or exact upper bounds. Memory is an estimate from the model's sizes: weights and optimiser to the
byte, activations by the rule of 34 bytes per token, layer and hidden unit (Korthikanti et al., arXiv 2205.05198, with
attention that keeps no scores), so that a plainly hopeless setting shows before it is tried.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlhfd.config import JobConfig
from rlhfd.core.overlap import cut_overcommit

MASTER = 4  # bytes of a float32 weight
GRADIENT_AND_ADAM = 4 + 8  # bytes of a trained weight's gradient and two moments
ACTIVATION = 34  # bytes per token, layer and hidden unit at 2 bytes a number
LORA_SIDES = 22  # in + out of a layer's seven linear maps, in hidden sizes
LOGITS_AT_ONCE = 1 << 27  # float32 numbers of one slice of logits, at most
LOGITS_COPIES = 3  # logits, their log-softmax and a gradient


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Derived numbers. `tokens`: completion tokens at most; sizes in bytes.

    `memory`: role -> what its devices must hold together; `disk`: checkpoints at their most, while one is written.
    """

    steps: int
    epochs: float
    prompts: int
    completions: int
    tokens: int
    overcommit: int
    staleness: str
    trained_parameters: int
    memory: Mapping[str, int]
    publication: int
    disk: int


def estimate(job: JobConfig, facts: Mapping[str, Any]) -> Estimate:
    """The numbers of a job whose model and data were inspected (`facts` as the inspection writes them)."""
    rollout, model, prompts = job.rollout, facts["model"], facts["prompts"]
    steps = steps_of(job, prompts["rows"])
    groups = steps * rollout.groups_per_step
    completions = groups * rollout.num_generations
    trained = _trained(job, model)
    return Estimate(
        steps=steps,
        epochs=groups / prompts["rows"],
        prompts=groups,
        completions=completions,
        tokens=completions * rollout.max_completion_length,
        overcommit=_overcommit(job),
        staleness=staleness(job),
        trained_parameters=trained,
        memory={"generator": _generator(job, model, prompts["tokens_max"]), "learner": _learner(job, model, trained)},
        publication=model["parameters"] * _width(job),
        disk=(job.checkpoint.save_total_limit + 1) * (model["parameters"] * MASTER + trained * 8),
    )


def steps_of(job: JobConfig, rows: int) -> int:
    """Learner steps: max_steps, or as many as num_train_epochs (default 1) over `rows` prompts take, rounded up."""
    epochs = job.job.num_train_epochs or 1.0
    return job.job.max_steps or max(1, ceil(rows * epochs / job.rollout.groups_per_step))


def staleness(job: JobConfig) -> str:
    """One sentence on the dial between waiting and staleness (Little's law: B + Δ groups are live, a step takes B)."""
    bound, groups = job.rollout.max_staleness, job.rollout.groups_per_step
    if bound == 0:
        return "synchronous: every token is trained from the version that sampled it, and generation waits for learning"
    extra = _overcommit(job)
    mean = min(1 + extra / groups, bound)
    return (
        f"mean staleness of a group's oldest token is about 1 + {extra}/{groups} = {mean:.2f} steps, never over "
        f"{bound}: a smaller rollout.overcommit lowers it, a larger one waits less for long completions"
    )


def _overcommit(job: JobConfig) -> int:
    return cut_overcommit(job.rollout.overcommit, job.rollout.groups_per_step, job.rollout.max_staleness)


def _width(job: JobConfig) -> int:
    """Bytes of a number in the model's compute type."""
    return 2 if job.model.dtype == "bfloat16" else 4


def _trained(job: JobConfig, model: Mapping[str, Any]) -> int:
    """Parameters with a gradient; of an adapter on all linear maps, about."""
    if not job.learner.use_peft:
        return model["parameters"]
    return LORA_SIDES * model["hidden"] * job.learner.lora_r * model["layers"]


def _learner(job: JobConfig, model: Mapping[str, Any], trained: int) -> int:
    tokens, width = job.learner.tokens_per_micro_batch, _width(job)
    layer = ACTIVATION * model["hidden"] * width // 2
    kept = (
        model["layers"] * model["hidden"] * width + layer
        if job.learner.gradient_checkpointing
        else model["layers"] * layer
    )
    logits = min(tokens * model["vocab"], LOGITS_AT_ONCE) * 4 * LOGITS_COPIES
    return model["parameters"] * MASTER + trained * GRADIENT_AND_ADAM + tokens * kept + logits


def _generator(job: JobConfig, model: Mapping[str, Any], longest_prompt: int) -> int:
    rollout, width = job.rollout, _width(job)
    live = (rollout.groups_per_step + _overcommit(job)) * rollout.num_generations
    length = min(longest_prompt + rollout.max_completion_length, model["max_model_len"])
    cache = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * width * length
    return model["parameters"] * width + min(live, job.generator.max_num_seqs) * cache
