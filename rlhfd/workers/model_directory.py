"""A model's directory: found, checked before anything loads it, and measured without loading its weights.

name in the job ─resolve─► directory ─check_safe─► config + safetensors headers ─measure─► facts
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlhfd.config import ModelSection
from rlhfd.errors import JobFileError
from rlhfd.workers import bundled

CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FETCHED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a hub repository: no code, no pickles
FETCHED_TRUSTED = [*FETCHED, "*.py"]


@dataclass(frozen=True, kw_only=True)
class Permissions:
    """What the daemon's settings allow; the job has to ask for it as well."""

    download: bool
    remote_code: bool


def resolve(model: ModelSection, cache_dir: Path, allowed: Permissions) -> Path:
    """The directory of the named model: local, bundled, cached or fetched. Raises JobFileError."""
    name = model.model_name_or_path
    if Path(name).is_absolute():
        return Path(name)
    if name.lower() == bundled.NAME:
        return bundled.smollm2_directory(cache_dir)
    return _of_hub(model, allowed)


def _of_hub(model: ModelSection, allowed: Permissions) -> Path:
    """From the Hugging Face cache, fetched into it where job and settings allow that."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = model.model_name_or_path
    wanted = FETCHED_TRUSTED if model.trust_remote_code else FETCHED
    try:
        found = cast("Any", huggingface_hub).snapshot_download(
            name, local_files_only=not (model.allow_download and allowed.download), allow_patterns=wanted
        )
    except HFValidationError as error:
        raise JobFileError(
            f'model.model_name_or_path = "{name}" is neither a directory nor a Hugging Face id: correct it'
        ) from error
    except LocalEntryNotFoundError as error:
        advice = how_to_fetch("model", asked=model.allow_download, allowed=allowed)
        raise JobFileError(
            f'model.model_name_or_path = "{name}" is neither a directory nor in the cache {constants.HF_HUB_CACHE}: '
            f"{advice}, or give a directory"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise JobFileError(
            f'model.model_name_or_path = "{name}" could not be fetched ({first_line(error)}): give another id, or a '
            "directory"
        ) from error
    return Path(found)


def how_to_fetch(section: str, *, asked: bool, allowed: Permissions) -> str:
    """What stands between the job and the hub."""
    if not asked:
        return f"set {section}.allow_download = true to fetch it"
    if not allowed.download:
        return (
            f"{section}.allow_download = true is not allowed by this daemon's settings, set allow_download = true there"
        )
    return "the hub could not be reached, try again"


def check_safe(directory: Path, model: ModelSection, allowed: Permissions) -> None:
    """Refuse pickled weights, and code unless job and daemon both trust it. Raises JobFileError."""
    try:
        files = sorted(path.name for path in directory.iterdir())
        unreadable = next((name for name in files if not os.access(directory / name, os.R_OK)), None)
    except OSError as error:
        raise JobFileError(
            f"the model directory {directory} can't be read ({error.strerror}): it must be there and readable for the "
            "daemon"
        ) from error
    if unreadable is not None:
        raise JobFileError(f"{directory / unreadable} can't be read: make it readable for the daemon")
    if not any(name.endswith(".safetensors") for name in files):
        _refuse_pickles(directory, files)
    code = _code(directory, files)
    if code is None or (model.trust_remote_code and allowed.remote_code):
        return
    missing = "this daemon's settings do not allow it" if model.trust_remote_code else "the job does not trust it"
    raise JobFileError(
        f"the model directory {directory} has {code}, and {missing}: use a model without code of its own, or set "
        "model.trust_remote_code = true and allow_remote_code = true in the daemon's settings"
    )


def _refuse_pickles(directory: Path, files: list[str]) -> None:
    """Unpickling runs code, and nothing here reads such weights, whoever trusts them."""
    pickle = next((name for name in files if name.endswith(PICKLES)), None)
    if pickle is not None:
        raise JobFileError(
            f"the model directory {directory} has pickled weights in {pickle} and no safetensors: save the model "
            "again with save_pretrained"
        )


def _code(directory: Path, files: list[str]) -> str | None:
    """What in the directory would run code when it is loaded."""
    for name in CONFIGS:
        if name in files and "auto_map" in read_json(directory / name):
            return f"an auto_map in {name}, which loads code"
    return next((f"code in {name}" for name in files if name.endswith(".py")), None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the model's directory, {} if the file is not there. Raises JobFileError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise JobFileError(f"{path} is no JSON that can be read ({first_line(error)}): the model is damaged") from error
    if not isinstance(data, dict):
        raise JobFileError(f"{path} holds no JSON object: the model is damaged")
    return cast("dict[str, Any]", data)


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a sentence."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
