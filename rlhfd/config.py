"""Job files and settings. Every mistake is one sentence: the key, its value, what to do (exit status 78).

    file ──load_job──► JobConfig + the local files that submit carries ──resolved──► plain data (stored with the job)
                          ▲                                                              │
                          └────────────────────────── parse_job ◄────────────────────────┘

A resolved job has every default written out and names carried files by name, so that parsing it again gives the same
job on any machine. The models are in `config_schema`.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from rlhfd.config_keys import later_value, refused_key
from rlhfd.config_rewards import (
    AnyReward,
    Count,
    FunctionReward,
    MathReward,
    ReasoningGymReward,
    RegexReward,
    Section,
    Table,
    Whole,
)
from rlhfd.config_schema import (
    CARRIED_SOURCES,
    SHARE_GENERATOR,
    AlgorithmSection,
    DataSection,
    JobConfig,
    LearnerSection,
    ModelSection,
    ResourcesSection,
    RolloutSection,
)
from rlhfd.errors import JobFileError

__all__ = [
    "SHARE_GENERATOR",
    "AlgorithmSection",
    "AnyReward",
    "DataSection",
    "Deadlines",
    "FunctionReward",
    "JobConfig",
    "LearnerSection",
    "MathReward",
    "ModelSection",
    "ReasoningGymReward",
    "RegexReward",
    "ResourcesSection",
    "RolloutSection",
    "Settings",
    "job_keys",
    "load_job",
    "load_settings",
    "parse_job",
    "resolved",
    "submit_key",
]

Model = TypeVar("Model", bound=BaseModel)
SYSTEM_SETTINGS = Path("/etc/rlhfd/config.toml")
SHOWN = 60  # characters of a value in a message
SENTENCES = {
    "missing": "{key} is missing: every job needs it",
    "value_error": "{error}",
    "literal_error": "{key} = {value} is not known: give {expected}",
    "greater_than_equal": "{key} = {value} is too small: give at least {ge}",
    "greater_than": "{key} = {value} is too small: give more than {gt}",
    "less_than_equal": "{key} = {value} is too large: give at most {le}",
    "less_than": "{key} = {value} is too large: give less than {lt}",
    "union_tag_not_found": "{key}.type is missing: say which kind of reward it is",
    "union_tag_invalid": '{key}.type = "{tag}" is not known: give {expected_tags}',
    "extra_forbidden": "{key} is no key here: remove it",
    "string_too_short": "{key} = {value} is empty: fill it in or remove it",
    "too_long": "{key} = {value} holds too much: give at most {max_length}",
    "too_short": "{key} = {value} is empty: give at least one",
    "string_pattern_mismatch": "{key} = {value} has not the form {pattern}: mend it",
    "finite_number": "{key} = {value} is not finite: give a finite number",
}
"""By pydantic's name of the complaint; what is not here and no type is told in pydantic's words."""
TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text in quotes"} | {
    **dict.fromkeys(("tuple", "list"), "a list"),
    **dict.fromkeys(("dict", "model", "model_attributes"), "a table"),
}


class Deadlines(Section):
    """Seconds after which a wait is an error that names what it waited for."""

    inspect: float = Field(
        default=900.0, gt=0, description="model and data at submit, a conversion or download included"
    )
    engine_start: float = Field(default=600.0, gt=0, description="a generator, until it is healthy")
    first_token: float = Field(default=120.0, gt=0, description="a request, until its first event")
    event_gap: float = Field(default=60.0, gt=0, description="between two events of a stream")
    pause: float = Field(default=60.0, gt=0, description="pausing the engine, loading weights")
    publish_patience: float = Field(
        default=60.0, gt=0, description="new weights, until every rollout in flight has gained a row"
    )
    score: float = Field(default=60.0, gt=0, description="a reward model's answer")
    learner_silence: float = Field(default=300.0, gt=0, description="between two frames of a busy learner")
    canary: float = Field(default=30.0, gt=0, description="one canary of the published weights")
    stall: float = Field(default=600.0, gt=0, description="a job in which nothing moves at all")
    drain: float = Field(default=120.0, gt=0, description="a pause or a stop, until its checkpoint is written")


class Settings(Section):
    """The daemon's own settings: /etc/rlhfd/config.toml, else $XDG_CONFIG_HOME/rlhfd/config.toml, else --config."""

    state_dir: str | None = Field(default=None, min_length=1, description="where everything durable lives")
    socket: str | None = Field(default=None, min_length=1, description="where clients connect")
    devices: tuple[str, ...] | None = Field(default=None, strict=False, description="GPU UUIDs to use; default: all")
    cpu_devices: tuple[Annotated[tuple[Whole, ...], Field(strict=False)], ...] | None = Field(
        default=None, strict=False, description="core sets that stand for devices where there is no GPU"
    )
    cache_dir: str | None = Field(default=None, min_length=1, description="converted models; default: the user's cache")
    generator_module: str = Field(
        default="vllm.entrypoints.openai.api_server", min_length=1, description="Python module that serves vLLM's HTTP"
    )
    allow_remote_code: bool = Field(default=False, description="whether a job may ask for trust_remote_code")
    allow_download: bool = Field(default=False, description="whether a job may ask for allow_download")
    retries: Count = Field(default=3, description="daemon attempts of a job without an applied step between them")
    restart_pause: float = Field(
        default=1.0, gt=0, le=60, description="seconds before a lost child is started again; doubles with each loss"
    )
    deadlines: Deadlines = Deadlines()


# --- parsing -------------------------------------------------------------------------------------------------------


def parse_job(data: Mapping[str, Any]) -> JobConfig:
    """The job from plain data. Raises JobFileError with one sentence."""
    _refuse_keys(data)
    return _validated(JobConfig, data)


def resolved(job: JobConfig) -> Table:
    """Plain JSON data with every default written out; parse_job(resolved(job)) == job."""
    return job.model_dump(mode="json")


def submit_key(job: JobConfig, file_hashes: Mapping[str, str], *, nonce: str = "") -> str:
    """SHA-256 (hex) over the resolved job and its files' hashes; a `nonce` makes the same job a new one (--again)."""
    identity = {"job": resolved(job), "files": dict(file_hashes), "nonce": nonce}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def job_keys() -> list[str]:
    """All keys of a job file, dotted; those of every kind of reward under `reward.`."""
    return sorted(f"{section}.{key}" for section in JobConfig.model_fields for key in _fields_of(section))


def _fields_of(section: str) -> set[str]:
    if section == "reward":
        return {key for kind in get_args(get_args(AnyReward)[0]) for key in kind.model_fields}
    annotation = JobConfig.model_fields[section].annotation
    return set(cast("type[BaseModel]", annotation).model_fields)


def _refuse_keys(data: Mapping[str, Any]) -> None:
    """Raise for the first key that no section has, and for values that are designed and not built."""
    for path, value in _leaves(data):
        section, _, key = path.partition(".")
        if section not in JobConfig.model_fields or key.partition(".")[0] not in _fields_of(section) | {""}:
            raise JobFileError(_one_line(refused_key(path, job_keys())))
        if (sentence := later_value(path, value)) is not None:
            raise JobFileError(_one_line(sentence))


def _leaves(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of what is no table; entries of the list of rewards stand under `reward.`."""
    for key, value in data.items():
        entries = cast("list[Any]", value) if key == "reward" and isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, Mapping) and entry:
                yield from ((f"{key}.{path}", leaf) for path, leaf in _leaves(cast("Mapping[str, Any]", entry)))
            else:
                yield key, cast("Any", entry)


def _validated(model: type[Model], data: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise JobFileError(_one_line(_sentence(error.errors(include_url=False)[0], data))) from error


def _sentence(error: ErrorDetails, data: Mapping[str, Any]) -> str:
    """One sentence for pydantic's first complaint: key, value, what to do."""
    kind, words = error["type"], {"key": _location(error, data), "value": _shown(error["input"])}
    if kind in SENTENCES:
        return SENTENCES[kind].format(**words, **error.get("ctx", {}))
    if (wanted := TYPES.get(kind.removesuffix("_type"))) is not None:
        return "{key} = {value} has the wrong type: give {wanted}".format(**words, wanted=wanted)
    return "{key} = {value} is refused: {why}".format(**words, why=error["msg"][:1].lower() + error["msg"][1:])


def _location(error: ErrorDetails, data: Any) -> str:
    """The dotted key of a complaint, without the tags that pydantic puts in between."""
    parts: list[str] = []
    for element in error["loc"]:
        inside = (isinstance(data, Mapping) and element in data) or (
            isinstance(data, list) and isinstance(element, int)
        )
        if inside:
            data = cast("Any", data)[element]
        if inside or (error["type"] == "missing" and element is error["loc"][-1]):
            parts.append(str(element))
    return ".".join(parts) or "the file"


def _one_line(sentence: str) -> str:
    """What a key or a value brings along must not tear the line, or speak to the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


# --- loading -------------------------------------------------------------------------------------------------------


def load_job(path: Path, sets: Sequence[str] = ()) -> tuple[JobConfig, dict[str, Path]]:
    """The job of a file with `--set a.b=value` applied, and the local files it names: {name: absolute path}.

    Files are looked for beside the job file. Raises JobFileError.
    """
    data = _read_toml(path)
    for assignment in sets:
        _set(data, assignment)
    try:
        job = parse_job(data)
        return _carry_files(_default_name(job, data, path), path.resolve().parent)
    except JobFileError as error:
        raise JobFileError(f"{path}: {error}") from error


def load_settings(environ: Mapping[str, str], config: Path | None = None) -> Settings:
    """The daemon's settings, defaults where there is no file. Raises JobFileError for a bad or a missing --config."""
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    path = config or next((p for p in (SYSTEM_SETTINGS, home / "rlhfd/config.toml") if p.is_file()), None)
    if path is None:
        return Settings()
    data = _read_toml(path)
    try:
        return _validated(Settings, data)
    except JobFileError as error:
        raise JobFileError(f"{path}: {error}") from error


def _read_toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobFileError(f"{path} can't be read ({error.strerror}): give the path of a job file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobFileError(f"{path} is no valid TOML ({error}): mend it") from error


def _set(data: Table, assignment: str) -> None:
    """Apply one `a.b=value`, in place; the value is TOML, or else a string. A number in the path picks from a list."""
    path, equals, text = assignment.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise JobFileError(f"--set {assignment} is no assignment: write it as section.key=value")
    table: Any = data
    try:
        for part in parts[:-1]:
            if isinstance(table, dict):
                cast("Table", table).setdefault(part, {})
            table = cast("Any", table)[_key(table, part)]
        table[_key(table, parts[-1])] = _toml_value(text.strip())
    except (ValueError, IndexError, TypeError) as error:
        raise JobFileError(f"--set {assignment} leads nowhere: {path} is no key of a table in the job file") from error


def _key(table: Any, part: str) -> int | str:
    return int(part) if isinstance(table, list) else part


def _toml_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _default_name(job: JobConfig, data: Table, path: Path) -> Table:
    table = resolved(job)
    if "name" not in data.get("job", {}):
        table["job"]["name"] = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:64] or table["job"]["name"]
    return table


def _carry_files(table: Table, base: Path) -> tuple[JobConfig, dict[str, Path]]:
    """Replace local paths: files by the name under which they travel, directories by their absolute path."""
    files: dict[str, Path] = {}
    data, model = table["data"], table["model"]
    scheme, _, target = data["source"].partition(":")
    if scheme in CARRIED_SOURCES:
        data["source"] = f"{scheme}:{_carry(files, 'data.source', base, target)}"
    elif scheme == "hf" and (directory := _directory(base, "data.source", target)):
        data["source"] = f"hf:{directory}"
    model["model_name_or_path"] = (
        _directory(base, "model.model_name_or_path", model["model_name_or_path"]) or model["model_name_or_path"]
    )
    for number, reward in enumerate(table["reward"]):
        if reward["type"] == "function":
            file, _, function = reward["path"].rpartition(":")
            reward["path"] = f"{_carry(files, f'reward.{number}.path', base, file)}:{function}"
    return parse_job(table), files


def _carry(files: dict[str, Path], key: str, base: Path, given: str) -> str:
    """The name under which a file travels: its own, numbered where two files share it."""
    path = _beside(base, key, given)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise JobFileError(f"{key} names {path}, which is {_why_not(path, 'file')}: correct the path")
    name, number = path.name, 1
    while files.get(name, path) != path:
        number += 1
        name = f"{path.stem}-{number}{path.suffix}"
    files[name] = path
    return name


def _directory(base: Path, key: str, given: str) -> str | None:
    """The absolute path of a local directory, None for an id. Raises for what can only be a path and is not there."""
    path = _beside(base, key, given)
    if path.is_dir():
        return str(path)
    if given.startswith((".", "/", "~")) or given.count("/") > 1:
        raise JobFileError(f"{key} names {path}, which is {_why_not(path, 'directory')}: correct the path")
    return None


def _beside(base: Path, key: str, given: str) -> Path:
    try:
        path = (base / Path(given).expanduser()).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise JobFileError(f"{key} = {_shown(given)} can't be used as a path ({error}): correct it") from error
    return path


def _why_not(path: Path, wanted: str) -> str:
    if not path.exists():
        return "not there"
    return "not readable" if path.is_file() and wanted == "file" else f"no {wanted}"
