"""What is said about keys that are not taken: refused with the reason, not there yet, or another framework's.

Tables first, then the one function that picks the sentence. Paths are dotted: `rollout.num_generations`.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Final, cast

SAMPLING: Final = frozenset(
    (
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "top_n_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "length_penalty",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding",
        "min_tokens",
        "min_new_tokens",
        "ignore_eos",
        "generation_kwargs",
        "logits_processors",
    )
)
"""Sampling parameters that renormalise or bend the policy: never taken, whatever the method."""

LATER_KEYS: Final[Mapping[str, str]] = {
    "rollout.overcommit_max": 'it bounds overcommit = "auto"',
    "rollout.chunk_tokens": "it sizes the chunks streamed into a reward model",
    "rollout.stream_scoring": "it streams chunks into a reward model",
    "rollout.chunk_probe_interval": "it sizes the chunks streamed into a reward model",
    "rollout.stop": "rollout.stop_token_ids stops on tokens already",
    "resources.scorer": "it places a reward model",
    "scorer": "it starts a reward model",
    "eval": "it evaluates while training",
    "algorithm.dynamic_sampling": "it replaces groups without a signal",
    "algorithm.dynamic_sampling_max": "it replaces groups without a signal",
    "algorithm.overlong_buffer": "it lowers the reward of long completions",
    "algorithm.kl_estimator": "it shapes the KL to a reference model",
    "algorithm.use_bias_correction_kl": "it shapes the KL to a reference model",
    "algorithm.entropy_coef": "it adds entropy to the loss",
    "algorithm.kl_coef": 'it belongs to loss_type = "ppo"',
    "algorithm.gamma": 'it belongs to loss_type = "ppo"',
    "algorithm.lam": 'it belongs to loss_type = "ppo"',
    "learner.optim": "the optimiser is AdamW",
}
"""Keys that are designed and not built: refused, not ignored."""

LATER_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "rollout.overcommit": {"auto": "give a number of groups, 0 turns it off"},
    "rollout.weight_update": {"keep": 'use "abort"'},
    "rollout.on_stale": {"drop": 'use "wait"'},
    "algorithm.loss_type": dict.fromkeys(("dr_grpo", "rloo", "gspo", "ppo"), 'use "dapo" or "grpo"'),
    "algorithm.prox_logp_method": {"metrics": 'use "loglinear", "recompute" or "none"'},
    "report.to": dict.fromkeys(("tensorboard", "wandb", "trackio", "prometheus"), "remove it and use rlhfd metrics"),
    "reward.type": dict.fromkeys(("model", "http", "judge"), 'use "function", "regex", "math" or "reasoning_gym"'),
}
"""Values that are designed and not built, with what to use instead."""

ENGINE_ARGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "revision", "hf_config_path", "load_format"),
        "model.model_name_or_path decides it",
    ),
    "dtype": "model.dtype decides it",
    "trust_remote_code": "model.trust_remote_code decides it",
    "max_model_len": "model.max_model_len decides it",
    "max_num_seqs": "generator.max_num_seqs decides it",
    "seed": "each request carries a seed derived from job.seed",
    **dict.fromkeys(
        ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        "resources.generator decides it",
    ),
    **dict.fromkeys(
        (
            "host",
            "port",
            "uds",
            "api_key",
            "served_model_name",
            "root_path",
            "api_server_count",
            "headless",
            "config",
            "middleware",
            "ssl_ca_certs",
            "ssl_certfile",
            "ssl_keyfile",
            "tokens_only",
        ),
        "the daemon listens to the engine on a socket of its own",
    ),
    **dict.fromkeys(
        (
            "logprobs_mode",
            "max_logprobs",
            "generation_config",
            "override_generation_config",
            "speculative_config",
            "logits_processors",
            "logits_processor_pattern",
            "structured_outputs_config",
        ),
        "the recorded log-probs must be those of the policy",
    ),
    "enable_chunked_prefill": "a seeded request whose prefill is split can kill the engine",
    **dict.fromkeys(("enable_scale_out", "stream_interval"), "the daemon's own protocol needs it"),
    **dict.fromkeys(
        ("quantization", "enable_lora", "max_lora_rank", "lora_modules"),
        "the engine serves the merged, trained weights",
    ),
    **dict.fromkeys(("runner", "task", "convert"), "the engine generates"),
    **dict.fromkeys(("weight_transfer_config", "enable_sleep_mode"), "the daemon publishes the weights itself"),
}
"""vLLM flags that rlhfd sets itself, and why."""

FOREIGN: Final[Mapping[str, str]] = {
    # verl
    "actor_rollout_ref.model.path": "model.model_name_or_path",
    "rollout.n": "rollout.num_generations",
    "rollout.response_length": "rollout.max_completion_length",
    "rollout.tensor_model_parallel_size": "resources.generator",
    "rollout.gpu_memory_utilization": "generator.engine_args",
    "optim.lr_warmup_steps": "learner.warmup_steps",
    "clip_ratio": "algorithm.epsilon",
    "clip_ratio_low": "algorithm.epsilon",
    "clip_ratio_high": "algorithm.epsilon_high",
    "clip_ratio_c": "algorithm.delta",
    "ppo_mini_batch_size": "algorithm.minibatches",
    "ppo_micro_batch_size_per_gpu": "learner.tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "learner.tokens_per_micro_batch",
    "ppo_epochs": "algorithm.num_iterations",
    "grad_clip": "learner.max_grad_norm",
    "kl_loss_coef": "algorithm.beta",
    "loss_agg_mode": "algorithm.loss_type",
    "enable_gradient_checkpointing": "learner.gradient_checkpointing",
    "lora_rank": "learner.lora_r",
    "target_modules": "learner.lora_target_modules",
    "data.train_batch_size": "rollout.groups_per_step",
    "max_response_length": "rollout.max_completion_length",
    "max_prompt_length": "model.max_model_len",
    "train_files": "data.source",
    "prompt_key": "data.prompt_column",
    "filter_overlong_prompts": "data.on_long_prompt",
    "total_epochs": "job.num_train_epochs",
    "total_training_steps": "job.max_steps",
    "save_freq": "checkpoint.save_steps",
    "max_actor_ckpt_to_keep": "checkpoint.save_total_limit",
    "experiment_name": "job.name",
    "trainer.logger": "report.to",
    "n_gpus_per_node": "resources.learner",
    "norm_adv_by_std_in_grpo": "algorithm.scale_rewards",
    "adv_estimator": "algorithm.loss_type",
    "rollout_is_threshold": "algorithm.behave_weight_cap",
    "custom_reward_function.path": "reward.path",
    # AReaL
    "gconfig.n_samples": "rollout.num_generations",
    "n_samples": "rollout.num_generations",
    "max_new_tokens": "rollout.max_completion_length",
    "max_head_offpolicyness": "rollout.max_staleness",
    "consumer_batch_size": "rollout.groups_per_step",
    "max_concurrent_rollouts": "rollout.overcommit",
    "actor.path": "model.model_name_or_path",
    "eps_clip": "algorithm.epsilon",
    "eps_clip_higher": "algorithm.epsilon_high",
    "c_clip": "algorithm.delta",
    "behav_imp_weight_cap": "algorithm.behave_weight_cap",
    "behave_imp_weight_cap": "algorithm.behave_weight_cap",
    "behave_imp_weight_mode": "algorithm.behave_weight_mode",
    "ppo_n_minibatches": "algorithm.minibatches",
    "kl_ctl": "algorithm.beta",
    "recompute_logprob": "algorithm.prox_logp_method",
    "max_tokens_per_mb": "learner.tokens_per_micro_batch",
    "train_dataset.path": "data.source",
    "train_dataset.batch_size": "rollout.groups_per_step",
    "total_train_epochs": "job.num_train_epochs",
    "total_train_steps": "job.max_steps",
    "trial_name": "job.name",
    "freq_steps": "checkpoint.save_steps",
    "allocation_mode": "resources.generator",
    # OpenRLHF
    "pretrain": "model.model_name_or_path",
    "prompt_data": "data.source",
    "input_key": "data.prompt_column",
    "label_key": "reward.answer_column",
    "rollout_batch_size": "rollout.groups_per_step",
    "n_samples_per_prompt": "rollout.num_generations",
    "generate_max_len": "rollout.max_completion_length",
    "prompt_max_len": "model.max_model_len",
    "actor_learning_rate": "learner.learning_rate",
    "init_kl_coef": "algorithm.beta",
    "max_norm": "learner.max_grad_norm",
    "micro_train_batch_size": "learner.tokens_per_micro_batch",
    "train_batch_size": "algorithm.minibatches",
    "max_epochs": "algorithm.num_iterations",
    "num_episodes": "job.num_train_epochs",
    "max_ckpt_num": "checkpoint.save_total_limit",
    "advantage_estimator": "algorithm.loss_type",
    "vllm_num_engines": "resources.generator",
    "vllm_tensor_parallel_size": "resources.generator",
    "vllm_gpu_memory_utilization": "generator.engine_args",
    "remote_rm_url": "reward.type",
    # anyone's
    "lr": "learner.learning_rate",
    "batch_size": "rollout.groups_per_step",
    "epochs": "job.num_train_epochs",
    # TRL, where ours counts something else
    "per_device_train_batch_size": "rollout.groups_per_step",
    "gradient_accumulation_steps": "learner.tokens_per_micro_batch",
    "steps_per_generation": "algorithm.minibatches",
    "vllm_importance_sampling_cap": "algorithm.behave_weight_cap",
    "dataset_name": "data.source",
    "reward_weights": "reward.weight",
    "torch_dtype": "model.dtype",
    "report_to": "report.to",
}
"""Keys of verl, AReaL, OpenRLHF (and TRL's other batch sizes) -> ours; matched by the longest suffix of the path."""


def refused_key(path: str, known: Collection[str]) -> str:
    """The sentence for a key that no section has; `known` are all the keys there are."""
    leaf = path.rpartition(".")[2]
    if leaf in SAMPLING:
        return (
            f"{path} is refused: with it the recorded log-probs would not be those of the policy and the ratio would "
            "be wrong, so training samples by rollout.temperature only; remove it"
        )
    later = next((name for name in (path, path.partition(".")[0]) if name in LATER_KEYS), None)
    if later is not None:
        return f"{path} comes with a later release ({LATER_KEYS[later]}): remove it"
    meant = _meant(path, leaf, known)
    return f"{path} is no key of a job file: " + (f"did you mean {meant}?" if meant else "remove it")


def later_value(path: str, value: object) -> str | None:
    """The sentence for a value that is designed and not built, or None."""
    if isinstance(value, list) and value:
        value = cast("list[object]", value)[0]
    instead = LATER_VALUES.get(path, {}).get(value) if isinstance(value, str) else None
    return None if instead is None else f'{path} = "{value}" comes with a later release: {instead}'


def refused_engine_arg(name: str) -> str | None:
    """The sentence for a vLLM flag that a job may not set, or None."""
    key = f"generator.engine_args.{name}"
    if name != name.replace("-", "_").lstrip("_"):
        return f"{key} is no flag's name: write it with underscores, {name.replace('-', '_').lstrip('_')}"
    if name in SAMPLING:
        return refused_key(key, ())
    plain = name.removeprefix("no_")
    return f"{key} is set by rlhfd: {ENGINE_ARGS[plain]}; remove it" if plain in ENGINE_ARGS else None


def _meant(path: str, leaf: str, known: Collection[str]) -> str | None:
    """The key that was probably meant: another framework's name, the right key in the wrong section, a near miss."""
    parts = path.split(".")
    for start in range(len(parts)):
        if (ours := FOREIGN.get(".".join(parts[start:]))) is not None:
            return ours
    by_leaf = {key.rpartition(".")[2]: key for key in known}
    if leaf in by_leaf:
        return by_leaf[leaf]
    section = path.partition(".")[0]
    for names in ([k for k in known if k.startswith(section + ".")], list(known)):
        if near := get_close_matches(path, names, n=1, cutoff=0.75):
            return near[0]
    near = get_close_matches(leaf, by_leaf, n=1, cutoff=0.8)
    return by_leaf[near[0]] if near else None
