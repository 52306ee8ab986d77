"""The kinds of [[reward]], and what every table of a job file shares."""

import json
import re
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
Whole: TypeAlias = Annotated[int, Field(ge=0, le=10**9)]
Table: TypeAlias = dict[str, Any]


class Section(BaseModel):
    """A table of the job file: frozen, strict types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Reward(Section):
    """What all rewards share."""

    name: str | None = Field(
        default=None, min_length=1, description="in metrics and samples; default: the function or the type"
    )
    weight: float = Field(default=1.0, description="the reward is the weighted sum")
    timeout: float = Field(default=10.0, gt=0, description="seconds; running out is an error event, never a zero")

    @property
    def label(self) -> str:
        """Its name in metrics and samples."""
        return self.name or str(getattr(self, "path", getattr(self, "type", ""))).rpartition(":")[2]


class FunctionReward(Reward):
    """A Python function of your own; the file is copied at submit."""

    type: Literal["function"]
    path: str = Field(description="`FILE.py:FUNCTION`")

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        if not re.fullmatch(r".+\.py:[A-Za-z_]\w*", path):
            raise ValueError(f"reward.path = {json.dumps(path)} names no function: write FILE.py:FUNCTION")
        return path

    @property
    def file(self) -> str:
        """The name under which its file travels."""
        return self.path.rpartition(":")[0]


class RegexReward(Reward):
    """`value` where the pattern matches (and says what the answer column says, if one is named), else `otherwise`."""

    type: Literal["regex"]
    pattern: str = Field(min_length=1, description="Python's re, searched in the completion")
    full_match: bool = Field(default=False, description="the whole completion must match")
    value: float = Field(default=1.0, description="for a match")
    otherwise: float = Field(default=0.0, description="for none")
    answer_column: str | None = Field(default=None, min_length=1, description="what the last match's group must equal")
    group: int | str | None = Field(
        default=None, description="that group; default the first, or the whole match without one"
    )

    @model_validator(mode="after")
    def _pattern_compiles(self) -> Self:
        try:
            compiled = re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"reward.pattern = {json.dumps(self.pattern)} is no regular expression ({error})"
            ) from error
        if self.group is not None and self.group not in {*compiled.groupindex, *range(compiled.groups + 1)}:
            raise ValueError(f"reward.group = {json.dumps(self.group)} is no group of {json.dumps(self.pattern)}")
        return self


class MathReward(Reward):
    """1 where the completion's final answer is mathematically equal to the answer column, else 0."""

    type: Literal["math"]
    answer_column: str = Field(default="answer", min_length=1, description="the column with the true answer")


class ReasoningGymReward(Reward):
    """The scorer of the reasoning-gym task that the prompt came from."""

    type: Literal["reasoning_gym"]
    dataset: str | None = Field(
        default=None, min_length=1, description="the task; default: what the row's metadata says"
    )
    answer_column: str = Field(default="answer", min_length=1, description="the column with the true answer")
    metadata_column: str = Field(
        default="metadata", min_length=1, description="the column with reasoning-gym's metadata"
    )
    answer_tag: str | None = Field(default=None, min_length=1, description="count only what stands in this tag")


AnyReward: TypeAlias = Annotated[
    FunctionReward | RegexReward | MathReward | ReasoningGymReward, Field(discriminator="type")
]
