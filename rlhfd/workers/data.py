"""The rows of a data set, one after another: a prompt and the columns beside it. Memory stays bounded.

    jsonl:FILE  parquet:FILE  hf:DIRECTORY-OR-ID  reasoning_gym:NAME ──rows──► Row, Row, …

Rows are counted from 1, as an editor counts lines, and every complaint names one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

from rlhfd.config import DataSection, FunctionReward, JobConfig, MathReward, ReasoningGymReward, RegexReward
from rlhfd.errors import JobFileError
from rlhfd.workers.model_directory import Permissions, first_line, how_to_fetch

PARQUET_BATCH = 256  # rows read at once
PUZZLES = 500  # made by reasoning-gym unless the job says how many
QUESTION = "question"  # reasoning-gym's name for the prompt


@dataclass(frozen=True, kw_only=True)
class Row:
    """`where`: "prompts.jsonl row 17". `prompt`: as the data has it. `columns`: what reaches the rewards beside it."""

    where: str
    prompt: Any
    columns: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Library:
    """Where carried files are (name -> path), what may be fetched, and where data sets are unpacked."""

    files: Mapping[str, Path]
    allowed: Permissions
    cache_dir: Path


def rows(job: JobConfig, library: Library) -> Iterator[Row]:
    """Every row of the job's data. Raises JobFileError at the first that can't be used."""
    data = job.data
    match data.scheme:
        case "jsonl":
            found = _jsonl(_carried(data, library), data.target)
        case "parquet":
            found = _parquet(_carried(data, library), data.target)
        case "reasoning_gym":
            return _reasoning_gym(job)
        case _:
            found = _hugging_face(data, library)
    needed = _needed(job)
    return (_row(where, values, data.prompt_column, needed) for where, values in found)


def _needed(job: JobConfig) -> dict[str, str]:
    """Columns that a reward of ours reads -> its name; what a function asks for is checked when it is imported."""
    needed: dict[str, str] = {}
    for reward in job.reward:
        match reward:
            case MathReward() | RegexReward():
                needed |= {} if reward.answer_column is None else {reward.answer_column: reward.label}
            case ReasoningGymReward():
                needed |= {reward.metadata_column: reward.label}
            case FunctionReward():
                pass
    return needed


def _row(where: str, values: dict[str, Any], prompt_column: str, needed: Mapping[str, str]) -> Row:
    if prompt_column not in values:
        others = ", ".join(f"'{name}'" for name in list(values)[:8])
        raise JobFileError(
            f"{where} has no column '{prompt_column}': "
            + (f"it has {others}; add it or set data.prompt_column" if others else "it is empty")
        )
    for column, label in needed.items():
        if values.get(column) is None:
            raise JobFileError(f"{where} has no column '{column}', which the reward {label} reads: add it")
    return Row(where=where, prompt=values[prompt_column], columns=_without(values, prompt_column))


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _carried(data: DataSection, library: Library) -> Path:
    path = library.files.get(data.target)
    if path is None:
        raise JobFileError(f'data.source = "{data.source}" names a file that was not sent along: submit the job again')
    return path


def _jsonl(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects, one a line; empty lines are left out, and still counted."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{name} row {number}", _json_object(line, f"{name} row {number}")
    except OSError as error:
        raise JobFileError(f"{name} can't be read ({error.strerror}): check the file") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise JobFileError(f"{where} is no JSON ({first_line(error)}): mend the line") from error
    if not isinstance(value, dict):
        raise JobFileError(f'{where} is no JSON object: write each row as {{"prompt": …}} on a line of its own')
    return cast("dict[str, Any]", value)


def _parquet(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]
    from pyarrow import parquet  # pyright: ignore[reportMissingTypeStubs]

    faults = (OSError, cast("type[Exception]", cast("Any", pa).ArrowException))
    number = 0
    try:
        with cast("Any", parquet).ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield f"{name} row {number}", values
    except faults as error:
        raise JobFileError(f"{name} is no Parquet file that can be read ({first_line(error)}): check it") from error


def _hugging_face(data: DataSection, library: Library) -> Iterator[tuple[str, dict[str, Any]]]:
    name = Path(data.target).name if Path(data.target).is_absolute() else data.target
    for number, values in enumerate(_hub_split(data, library), 1):
        yield f"{name} row {number}", dict(values)


def _hub_split(data: DataSection, library: Library) -> Any:
    """One split of a data set saved to disk, of a directory of data files, or of the hub."""
    import datasets  # pyright: ignore[reportMissingTypeStubs]

    local = Path(data.target) if Path(data.target).is_absolute() else None
    hub = cast("Any", datasets)
    hub.disable_progress_bars()
    fetch = data.allow_download and library.allowed.download
    hub.config.HF_HUB_OFFLINE = not fetch  # the model's download may have been allowed, and this not
    try:
        if local is not None and ((local / "state.json").is_file() or (local / "dataset_dict.json").is_file()):
            found = hub.load_from_disk(str(local))
        else:
            cache = None if local is None else str(library.cache_dir / "datasets")
            found = hub.load_dataset(data.target, cache_dir=cache, **data.source_args)
    except (OSError, ValueError, TypeError, RuntimeError, hub.exceptions.DatasetsError) as error:
        raise JobFileError(_no_data_set(data, error, library.allowed if local is None else None)) from error
    if not isinstance(found, hub.DatasetDict):
        return found
    if data.split not in found:
        there = ", ".join(sorted(map(str, found)))
        raise JobFileError(f'data.split = "{data.split}" is not in {data.target}: it has {there}')
    return found[data.split]


def _no_data_set(data: DataSection, error: BaseException, allowed: Permissions | None) -> str:
    """Why it can't be loaded; `allowed` is None for a local one."""
    why = first_line(error)
    if allowed is None or (data.allow_download and allowed.download):
        return f'data.source = "{data.source}" can\'t be loaded ({why}): correct the name, or data.source_args'
    advice = how_to_fetch("data", asked=data.allow_download, allowed=allowed)
    return f'data.source = "{data.source}" is not in the Hugging Face cache ({why}): {advice}, or give a directory'


def _reasoning_gym(job: JobConfig) -> Iterator[Row]:
    """Puzzles made on the spot. All of an entry stays in the columns: its scorer wants it as it was."""
    name, options = puzzle_options(job)
    column = QUESTION if job.data.prompt_column == "prompt" else job.data.prompt_column
    made, needed = _puzzles(name, options), _needed(job)
    for number in range(len(made)):
        entry = made[number]
        where = f"{name} row {number + 1}"
        yield Row(where=where, prompt=_row(where, entry, column, needed).prompt, columns=entry)


def puzzle_options(job: JobConfig) -> tuple[str, dict[str, Any]]:
    """The data set's name and its arguments: those after the ?, data.source_args, and a size and seed of our own."""
    name, _, query = job.data.target.partition("?")
    given: dict[str, Any] = {key: _number(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    if both := sorted(given.keys() & job.data.source_args.keys()):
        raise JobFileError(f"{both[0]} stands both in data.source and in data.source_args: give it once")
    return name, {"size": PUZZLES, "seed": job.job.seed, **given, **job.data.source_args}


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _puzzles(name: str, options: dict[str, Any]) -> Any:
    import reasoning_gym  # pyright: ignore[reportMissingTypeStubs]
    from reasoning_gym import factory  # pyright: ignore[reportMissingTypeStubs]

    known = list(cast("Any", factory).DATASETS)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "see reasoning-gym's gallery for the names"
        raise JobFileError(f'data.source = "reasoning_gym:{name}" is no data set of reasoning-gym: {hint}')
    try:
        return cast("Any", reasoning_gym).create_dataset(name, **options)
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise JobFileError(
            f"reasoning-gym refuses the arguments of {name} ({first_line(error)}): correct them"
        ) from error
