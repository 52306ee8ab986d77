"""The job file's reference, in Markdown, from the models themselves: `python -m rlhfd.cli.reference > docs/job.md`."""

import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlhfd.config import AnyReward, JobConfig, Settings

INTRODUCTION = """# Reference of the job file

Made from the code by `python -m rlhfd.cli.reference > docs/job.md`; do not edit it by hand.

Every key has a default except those marked *needed*. Local files are looked for beside the job file. Any key can be
set from the command line: `rlhfd submit JOB.toml --set learner.learning_rate=1e-5 --set reward.0.weight=2`.
"""
SETTINGS = """## The daemon's settings

`/etc/rlhfd/config.toml`, else `$XDG_CONFIG_HOME/rlhfd/config.toml`, or `--config FILE`.
"""
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "table"}


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, field in JobConfig.model_fields.items():
        if name == "reward":
            parts += ["## [[reward]]\n\nOne table for each reward; the reward of a completion is their weighted sum.\n"]
            parts += [_table(f'### type = "{_tag(kind)}"', kind) for kind in get_args(get_args(AnyReward)[0])]
        else:
            parts.append(_table(f"## [{name}]", _model(field)))
    parts.append(SETTINGS)
    parts += _settings(Settings, "")
    return "\n".join(parts)


def _settings(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The settings themselves, then their tables."""
    nested = {name: field for name, field in model.model_fields.items() if _is_model(field.annotation)}
    yield "\n".join(
        [*_head(), *(_line(f"{prefix}{n}", f) for n, f in model.model_fields.items() if n not in nested), ""]
    )
    for name, field in nested.items():
        yield _table(f"### [{name}]", _model(field))


def _table(title: str, model: type[BaseModel]) -> str:
    rows = [_line(name, field) for name, field in model.model_fields.items() if name != "type"]
    return "\n".join([title, "", (model.__doc__ or "").strip(), "", *_head(), *rows, ""])


def _head() -> list[str]:
    return ["| key | value | default | |", "|---|---|---|---|"]


def _line(name: str, field: FieldInfo) -> str:
    cells = (f"`{name}`", _kind(field.annotation), _default(field), field.description or "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*needed*"
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None or value is PydanticUndefined else f"`{json.dumps(value)}`"


def _kind(annotation: Any) -> str:
    """A type in a reader's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f'`"{value}"`' for value in arguments)
    if origin in {Union, UnionType}:
        return " or ".join(_kind(part) for part in arguments if part is not type(None))
    if origin is tuple:
        return f"list ({_kind(arguments[0])})" if arguments else "empty list"
    return WORDS.get(origin or annotation, "table")


def _tag(kind: type[BaseModel]) -> str:
    return get_args(kind.model_fields["type"].annotation)[0]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model(field: FieldInfo) -> type[BaseModel]:
    assert _is_model(field.annotation)  # noqa: S101  # every table but [[reward]] is a model
    return field.annotation  # pyright: ignore[reportReturnType]


if __name__ == "__main__":
    print(reference(), end="")
