"""The job's [[reward]] list as the worker reads it: one struct a type, and how each becomes a `Reward`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, assert_never, cast

import msgspec

from rlhfd.core.wire import RewardSetup
from rlhfd.errors import JobFileError
from rlhfd.workers.reward_function import load_function
from rlhfd.workers.reward_rules import math_reward, reasoning_gym_reward, regex_reward
from rlhfd.workers.scoring import Reward


class Spec(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all [[reward]] entries have; keys that concern only the daemon (weight) are left aside."""

    name: str = ""
    timeout: float = 10.0


class FunctionSpec(Spec, frozen=True, kw_only=True, tag="function"):
    """`file`: the carried file's name inside `files_dir`."""

    path: str
    file: str


class RegexSpec(Spec, frozen=True, kw_only=True, tag="regex"):
    """See RegexReward."""

    pattern: str
    full_match: bool = False
    value: float = 1.0
    otherwise: float = 0.0
    answer_column: str | None = None
    group: int | str | None = None


class MathSpec(Spec, frozen=True, kw_only=True, tag="math"):
    """See MathReward."""

    answer_column: str = "answer"


class ReasoningGymSpec(Spec, frozen=True, kw_only=True, tag="reasoning_gym"):
    """See ReasoningGymReward."""

    dataset: str | None = None
    answer_column: str = "answer"
    metadata_column: str = "metadata"
    answer_tag: str | None = None


AnySpec: TypeAlias = FunctionSpec | RegexSpec | MathSpec | ReasoningGymSpec


def read_specs(text: str) -> list[AnySpec]:
    """The [[reward]] list from its JSON; a null is a key that was left out. Raises JobFileError."""
    entries = cast("list[dict[str, Any]]", json.loads(text))
    given = [{key: value for key, value in entry.items() if value is not None} for entry in entries]
    try:
        return msgspec.convert(given, list[AnySpec])
    except msgspec.ValidationError as problem:
        raise JobFileError(f"[[reward]] can't be used: {problem}") from problem


def prepare(spec: AnySpec, setup: RewardSetup) -> Reward:
    """The reward that one entry describes. Raises JobFileError."""
    match spec:
        case FunctionSpec():
            source = Path(setup.files_dir) / spec.file
            return load_function(name=spec.name, path=spec.path, source=source, columns=setup.columns)
        case RegexSpec():
            return regex_reward(
                name=spec.name or "regex",
                pattern=spec.pattern,
                full_match=spec.full_match,
                value=spec.value,
                otherwise=spec.otherwise,
                answer_column=spec.answer_column,
                group=spec.group,
            )
        case MathSpec():
            return math_reward(name=spec.name or "math", answer_column=spec.answer_column)
        case ReasoningGymSpec():
            return reasoning_gym_reward(
                name=spec.name or "reasoning_gym",
                dataset=spec.dataset,
                answer_column=spec.answer_column,
                metadata_column=spec.metadata_column,
                answer_tag=spec.answer_tag,
            )
        case _:
            assert_never(spec)


def display_names(rewards: Sequence[Reward]) -> list[str]:
    """The rewards' names made unique, in order: a second `regex` is `regex_2`."""
    given = [reward.name for reward in rewards]
    counts = [given[: number + 1].count(name) for number, name in enumerate(given)]
    return [f"{name}_{count}" if count > 1 else name for name, count in zip(given, counts, strict=True)]
