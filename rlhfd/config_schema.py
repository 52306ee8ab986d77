"""What a job file may say: one frozen model per table, with every default, bound and cross-field rule.

The names are TRL's where TRL has one. Descriptions become the reference in docs/job.md. What a mistake sounds like is
`config`'s business; keys that are refused stand in `config_keys`.
"""

import json
import re
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from rlhfd.config_keys import refused_engine_arg
from rlhfd.config_rewards import AnyReward, Count, Section, Table, Whole

SOURCES = ("jsonl", "parquet", "hf", "reasoning_gym")
CARRIED_SOURCES = ("jsonl", "parquet")
SHARE_GENERATOR = "share:generator"


class JobSection(Section):
    """What the run is called and how long it goes."""

    name: str = Field(default="job", description="default: the job file's name")
    seed: int = Field(default=42, ge=0, lt=2**63, description="every random choice derives from it")
    max_steps: Whole = Field(default=0, description="learner steps; 0: num_train_epochs says how many")
    num_train_epochs: float | None = Field(
        default=None, gt=0, description="passes over the data; default 1 without max_steps"
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ValueError(
                f"job.name = {json.dumps(name)} is no plain name: use letters, digits, "
                '".", "_" and "-" (at most 64), a letter or digit first'
            )
        return name

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_steps and self.num_train_epochs is not None:
            raise ValueError("job.max_steps and job.num_train_epochs both say how long the run goes: give one of them")
        return self


class ModelSection(Section):
    """The start model."""

    model_name_or_path: str = Field(min_length=1, description="a directory, a Hugging Face id, `smollm2-135m-instruct`")
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="compute; master weights stay float32"
    )
    max_model_len: Count | None = Field(
        default=None, description="tokens, prompt and completion; default: the model's own"
    )
    trust_remote_code: bool = Field(
        default=False, description="take a model with code of its own; the daemon must allow it too"
    )
    allow_download: bool = Field(
        default=False, description="fetch the id from the hub at submit; the daemon must allow it too"
    )


class DataSection(Section):
    """The prompts. Columns other than the prompt's reach the rewards."""

    source: str = Field(description="`jsonl:FILE`, `parquet:FILE`, `hf:DIRECTORY-OR-ID`, `reasoning_gym:NAME?size=500`")
    source_args: Table = Field(
        default_factory=dict, description="of reasoning_gym: size, seed, …; of hf: name, revision"
    )
    prompt_column: str = Field(default="prompt", min_length=1, description="a string or a list of chat messages")
    system_prompt: str | None = Field(
        default=None, min_length=1, description="put in front where the messages have none"
    )
    apply_chat_template: bool = Field(
        default=True, description="wrap a plain string as one user message, if there is a template"
    )
    split: str = Field(default="train", min_length=1, description="of a Hugging Face data set")
    shuffle: bool = Field(default=True, description="a seeded order, another one each epoch")
    on_long_prompt: Literal["error", "skip"] = Field(
        default="error", description="a prompt that leaves no room to complete it"
    )
    allow_download: bool = Field(
        default=False, description="fetch the data from the hub at submit; the daemon must allow it too"
    )

    @property
    def scheme(self) -> str:
        """What stands before the colon of `source`."""
        return self.source.partition(":")[0]

    @property
    def target(self) -> str:
        """What stands behind the colon of `source`."""
        return self.source.partition(":")[2]

    @model_validator(mode="after")
    def _source_known(self) -> Self:
        if self.scheme not in SOURCES or not self.target:
            raise ValueError(
                f'data.source = "{self.source}" says no kind of data: put one of '
                f"{', '.join(s + ':' for s in SOURCES)} before the name, as in jsonl:prompts.jsonl"
            )
        if self.source_args and self.scheme in CARRIED_SOURCES:
            raise ValueError(f"data.source_args has nothing to say about {self.scheme}: remove it")
        if self.allow_download and self.scheme != "hf":
            raise ValueError(f"data.allow_download has nothing to fetch for {self.scheme}: remove it")
        return self


class RolloutSection(Section):
    """How completions are sampled, and how far generation may run ahead of learning."""

    groups_per_step: Count = Field(default=8, description="B, prompts per learner step")
    num_generations: int = Field(default=8, ge=2, le=4096, description="completions per prompt")
    max_completion_length: Count = Field(default=256, description="tokens")
    temperature: float = Field(default=1.0, gt=0, le=100, description="the only sampling parameter")
    max_staleness: Whole = Field(
        default=4, description="K, steps that a token may lag behind the version it trains; 0: synchronous"
    )
    overcommit: Whole = Field(default=2, description="Δ, groups generated beyond B; default 0 where max_staleness is 0")
    overlap_learning: bool = Field(default=True, description="generation goes on while the learner works")
    batch_order: Literal["first_complete", "fifo"] = Field(
        default="first_complete", description="fifo: the same batches always"
    )
    weight_update: Literal["abort"] = Field(default="abort", description="new weights resend what is in flight")
    on_stale: Literal["wait"] = Field(default="wait", description="the learner waits rather than drop stale groups")
    stop_token_ids: tuple[Whole, ...] = Field(
        default=(), strict=False, description="end a completion, beside the model's own"
    )

    @model_validator(mode="before")
    @classmethod
    def _overcommit_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        table = cast("Table", data)
        return {"overcommit": 0, **table} if table.get("max_staleness") == 0 else table

    @model_validator(mode="after")
    def _synchronous_runs_not_ahead(self) -> Self:
        if self.max_staleness == 0 and self.overcommit > 0:
            raise ValueError(
                f"rollout.overcommit = {self.overcommit} generates ahead, which rollout.max_staleness = 0 forbids: "
                "set overcommit to 0 or max_staleness to at least 1"
            )
        return self


class AlgorithmSection(Section):
    """Loss, proximal policy and advantages."""

    loss_type: Literal["dapo", "grpo"] = Field(
        default="dapo", description="dapo: mean over tokens; grpo: over sequences"
    )
    use_decoupled_loss: bool = Field(
        default=True, description="separate behaviour and proximal policy; default as prox_logp_method"
    )
    prox_logp_method: Literal["loglinear", "recompute", "none"] = Field(
        default="loglinear",
        description="loglinear: A-3PO, no extra forward pass; recompute: one forward pass at the step's start",
    )
    zero_staleness: Literal["behave", "theta"] = Field(
        default="behave", description="the proximal policy of fresh tokens"
    )
    epsilon: float = Field(default=0.2, gt=0, lt=1, description="clip range below 1")
    epsilon_high: float | None = Field(default=None, gt=0, description="clip range above 1; default: epsilon")
    delta: float | None = Field(
        default=None, gt=1, description="upper bound of the whole ratio where the advantage is negative"
    )
    behave_weight_cap: float = Field(default=5.0, gt=1, description="cap of the behaviour weight")
    behave_weight_mode: Literal["token_truncate", "token_mask", "none"] = Field(
        default="token_truncate", description="what the cap does to a token beyond it"
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="whose deviation divides advantages"
    )
    mask_truncated_completions: bool = Field(
        default=False, description="keep completions cut by length out of the loss"
    )
    num_iterations: Count = Field(default=1, description="passes over a step's data")
    minibatches: Count = Field(default=1, description="optimiser steps per pass, each over whole groups")
    beta: float = Field(default=0.0, ge=0, description="KL to the start model; only 0 for now")

    @model_validator(mode="before")
    @classmethod
    def _linked_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        table = dict(cast("Table", data))
        if table.get("use_decoupled_loss") is False:
            table.setdefault("prox_logp_method", "none")
        table.setdefault("use_decoupled_loss", table.get("prox_logp_method") != "none")
        return table

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta != 0.0:
            raise ValueError(f"algorithm.beta = {self.beta} comes with a later release: set it to 0.0")
        if self.use_decoupled_loss == (self.prox_logp_method == "none"):
            raise ValueError(
                f"algorithm.use_decoupled_loss = {str(self.use_decoupled_loss).lower()} contradicts "
                f'algorithm.prox_logp_method = "{self.prox_logp_method}": give one of them'
            )
        return self


class LearnerSection(Section):
    """The optimiser and what it trains."""

    learning_rate: float = Field(default=1e-6, gt=0, le=1, description="peak")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = Field(
        default="constant", description="linear and cosine fall to 0 at the last step"
    )
    warmup_steps: Whole = Field(default=0, description="steps over which the rate rises")
    weight_decay: float = Field(default=0.0, ge=0, description="not on norms and biases")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are scaled down to it")
    tokens_per_micro_batch: Count = Field(
        default=4096, description="padded tokens in one forward pass: the memory dial"
    )
    gradient_checkpointing: bool = Field(default=False, description="less memory for a third more time")
    use_peft: bool = Field(default=False, description="train a LoRA adapter instead of all weights")
    lora_r: Count = Field(default=16, description="rank")
    lora_alpha: Count = Field(default=32, description="scale")
    lora_dropout: float = Field(default=0.0, description="only 0: the learner's log-probs must be the policy's")
    lora_target_modules: tuple[str, ...] = Field(default=(), strict=False, description="empty: all linear layers")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.lora_dropout != 0.0:
            raise ValueError(
                f"learner.lora_dropout = {self.lora_dropout} is refused, because with dropout the learner's log-probs "
                "are not the policy's: set it to 0.0"
            )
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            raise ValueError(
                f'learner.warmup_steps = {self.warmup_steps} does nothing under lr_scheduler_type = "constant": '
                'use "constant_with_warmup"'
            )
        lora = {name: field.default for name, field in type(self).model_fields.items() if name.startswith("lora_")}
        unused = (
            None if self.use_peft else next((n for n, default in lora.items() if getattr(self, n) != default), None)
        )
        if unused is not None:
            raise ValueError(f"learner.{unused} does nothing without learner.use_peft = true: set that or remove it")
        return self


class ResourcesSection(Section):
    """Devices per role: GPUs, or core sets on a machine without one."""

    generator: Count = Field(default=1, description="devices; on GPUs also the tensor-parallel size")
    learner: int | str = Field(default=1, description='1, or "share:generator" to take turns on one device')

    @model_validator(mode="after")
    def _one_learner(self) -> Self:
        if self.learner not in (1, SHARE_GENERATOR):
            raise ValueError(
                f"resources.learner = {json.dumps(self.learner)} is not offered: "
                f'give 1, or "{SHARE_GENERATOR}" to take turns with the generator'
            )
        if self.learner == SHARE_GENERATOR and self.generator != 1:
            raise ValueError(
                f'resources.learner = "{SHARE_GENERATOR}" needs resources.generator = 1, not {self.generator}'
            )
        return self


class GeneratorSection(Section):
    """The vLLM server that samples."""

    max_num_seqs: Count = Field(default=64, description="completions sampled at once, at most")
    engine_args: Table = Field(default_factory=dict, description="vLLM's own flags, with underscores")

    @field_validator("engine_args")
    @classmethod
    def _not_ours(cls, args: Table) -> Table:
        for name in args:
            if (sentence := refused_engine_arg(name)) is not None:
                raise ValueError(sentence)
        return args


class CheckpointSection(Section):
    """What is kept on disk."""

    save_steps: Count = Field(default=10, description="steps between checkpoints; the last step is always kept")
    save_total_limit: int = Field(default=2, ge=2, le=10**6, description="checkpoints kept, and the rollouts since")


class ReportSection(Section):
    """Where metrics go, beside the store."""

    to: tuple[()] = Field(default=(), strict=False, description="trackers; none yet: `rlhfd metrics` has them all")


class JobConfig(Section):
    """A whole job file."""

    job: JobSection = JobSection()
    model: ModelSection
    data: DataSection
    reward: Annotated[tuple[AnyReward, ...], Field(strict=False, min_length=1)]
    rollout: RolloutSection = RolloutSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    learner: LearnerSection = LearnerSection()
    resources: ResourcesSection = ResourcesSection()
    generator: GeneratorSection = GeneratorSection()
    checkpoint: CheckpointSection = CheckpointSection()
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        groups, minibatches = self.rollout.groups_per_step, self.algorithm.minibatches
        if minibatches > groups:
            raise ValueError(
                f"algorithm.minibatches = {minibatches} is more than rollout.groups_per_step = {groups}: "
                "a minibatch holds at least one whole group"
            )
        steps, warmup = self.job.max_steps, self.learner.warmup_steps
        if 0 < steps < warmup:
            raise ValueError(f"learner.warmup_steps = {warmup} is more than job.max_steps = {steps}: lower it")
        names = [reward.label for reward in self.reward]
        if (double := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ValueError(f'two rewards are called "{double}": give each a reward.name of its own')
        return self
