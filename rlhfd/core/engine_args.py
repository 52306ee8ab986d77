"""vLLM's own flags, as a job may pass them in `engine_args`, and those that rlhfd keeps for itself."""

from collections.abc import Mapping

from rlhfd.errors import JobFileError

# Flags whose value rlhfd derives from the job, the lease or the protocol between the two.
SET_BY_RLHFD = frozenset(
    {
        "dtype",
        "enable_chunked_prefill",  # a seeded request dies on a split prefill in the CPU build
        "enable_scale_out",
        "generation_config",  # "vllm": the model's own sampling defaults must not slip in
        "host",
        "logprobs_mode",
        "max_model_len",
        "model",
        "port",
        "runner",
        "served_model_name",
        "stream_interval",
        "tensor_parallel_size",
        "uds",
    }
)
# Flags that would change what is sampled, who may connect, or what code runs, behind rlhfd's back.
REFUSED = SET_BY_RLHFD | frozenset(
    {
        "api_key",
        "config",
        "enable_lora",
        "headless",
        "load_format",
        "logits_processors",
        "lora_modules",
        "max_logprobs",
        "middleware",
        "override_generation_config",
        "root_path",
        "ssl_ca_certs",
        "ssl_certfile",
        "ssl_keyfile",
        "tokens_only",
        "trust_remote_code",
    }
)


def check_engine_args(engine_args: Mapping[str, object], where: str = "generator.engine_args") -> None:
    """Raises JobFileError that names the key which rlhfd keeps for itself, or which is not spelled with underscores."""
    for key in engine_args:
        name = key.strip("-").replace("-", "_")
        if name in REFUSED or name.removeprefix("no_") in REFUSED:
            raise JobFileError(f"{where}.{key} is set by rlhfd itself; remove it from the job file")
        if name != key:
            raise JobFileError(f'{where}.{key} must be spelled "{name}"')
