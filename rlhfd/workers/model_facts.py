"""What is known of a model without loading its weights: from its configuration and its safetensors headers."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import msgspec

from rlhfd.config import ModelSection
from rlhfd.errors import JobFileError
from rlhfd.workers.model_directory import first_line, read_json

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
MAX_HEADER = 100 * 1024 * 1024  # bytes; the format's own limit


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the daemon knows of a model. Sizes in bytes, lengths in tokens."""

    dir: str
    name: str
    parameters: int
    bytes: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_model_len: int
    tied: bool
    has_chat_template: bool
    eos_token_ids: list[int]
    architecture: str

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure(directory: Path, model: ModelSection, tokenizer: Any) -> ModelFacts:
    """The model's facts from its configuration and the headers of its weights. Raises JobFileError."""
    config = _text_config(directory, trust=model.trust_remote_code)
    architecture = next(iter(config.architectures or ()), "")
    if not architecture.endswith("ForCausalLM"):
        raise JobFileError(
            f"the model in {directory} is a {architecture or 'model without an architecture'}, not a causal language "
            "model: give one whose config.json names an architecture …ForCausalLM"
        )
    if getattr(config, "quantization_config", None):
        raise JobFileError(f"the model in {directory} is quantised, which can't be trained: give its plain weights")
    heads = int(config.num_attention_heads)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    parameters, size = _weights(directory, tied=tied)
    return ModelFacts(
        dir=str(directory),
        name=model.model_name_or_path,
        parameters=parameters,
        bytes=size,
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab=int(config.vocab_size),
        max_model_len=_max_model_len(config, model, directory),
        tied=tied,
        has_chat_template=bool(tokenizer.chat_template),
        eos_token_ids=_eos(directory, tokenizer),
        architecture=architecture,
    )


def _text_config(directory: Path, *, trust: bool) -> Any:
    from transformers import AutoConfig

    if not (directory / "config.json").is_file():
        raise JobFileError(f"{directory} is no model directory, it has no config.json: give a directory with one")
    try:
        return cast("Any", AutoConfig).from_pretrained(directory, local_files_only=True, trust_remote_code=trust)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise JobFileError(
            f"{directory}/config.json can't be used ({first_line(error)}): the model is damaged"
        ) from error


def _max_model_len(config: Any, model: ModelSection, directory: Path) -> int:
    own = int(getattr(config, "max_position_embeddings", None) or 0)
    if model.max_model_len is not None and own and model.max_model_len > own:
        raise JobFileError(
            f"model.max_model_len = {model.max_model_len} is over the {own} tokens that the model in {directory} "
            "takes: lower it"
        )
    if not (own or model.max_model_len):
        raise JobFileError(f"the model in {directory} names no longest length: set model.max_model_len")
    return model.max_model_len or own


def _eos(directory: Path, tokenizer: Any) -> list[int]:
    """Every token that ends a completion, by configuration, generation configuration or tokenizer."""
    ids: set[int] = set()
    for found in (
        read_json(directory / "config.json").get("eos_token_id"),
        read_json(directory / "generation_config.json").get("eos_token_id"),
        tokenizer.eos_token_id,
    ):
        several = cast("list[Any]", found) if isinstance(found, list) else [found]
        ids |= {token for token in several if isinstance(token, int)}
    return sorted(ids)


def _weights(directory: Path, *, tied: bool) -> tuple[int, int]:
    """(parameters, bytes on disk); a tied head counts once."""
    files = _weight_files(directory)
    tensors: dict[str, int] = {}
    for file in files:
        tensors.update(_tensors(file))
    if not tied and not any(name.endswith(HEADS) for name in tensors):
        raise JobFileError(f"the weights in {directory} lack the head, lm_head.weight: the model is damaged")
    counted = (size for name, size in tensors.items() if not (tied and name == HEADS[0]))
    return sum(counted), sum(file.stat().st_size for file in files)


def _weight_files(directory: Path) -> list[Path]:
    """The files that transformers and vLLM load: those of the index, or the one, or all."""
    try:
        shards = msgspec.convert(read_json(directory / INDEX).get("weight_map", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise JobFileError(f"{directory / INDEX} has no map of weights: the model is damaged") from error
    files = [directory / name for name in sorted(set(shards.values()))]
    if (lost := next((file for file in files if not file.is_file()), None)) is not None:
        raise JobFileError(f"{lost} is not there, but {INDEX} names it: get the model again")
    if not files and (directory / WHOLE).is_file():
        files = [directory / WHOLE]
    files = files or sorted(directory.glob("*.safetensors"))
    if not files:
        raise JobFileError(
            f"{directory} has no weights in *.safetensors, and no other kind is read: save the model again with "
            "save_pretrained"
        )
    return files


def _tensors(file: Path) -> dict[str, int]:
    """Name -> elements of every tensor of a safetensors file, from its header. Raises JobFileError."""
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(8), "little")
            header = cast("Mapping[str, Any]", json.loads(source.read(length)) if 0 < length <= MAX_HEADER else {})
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        wanted = 8 + length + max(entry["data_offsets"][1] for entry in entries.values())
        elements = {name: prod(entry["shape"]) for name, entry in entries.items()}
        size = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise JobFileError(
            f"{file} is no safetensors file that can be read ({first_line(error)}): get it again"
        ) from error
    if size != wanted:
        raise JobFileError(f"{file} has {size} bytes where its header wants {wanted}: get it again")
    return elements
