"""The rewards that need no user code: a regular expression, math-verify, and reasoning-gym's own scorers.

The heavy libraries are imported when such a reward is set up, never before. A wrong answer is a low reward; a row
without a usable gold answer is an error, because no completion could have been right.
"""

import functools
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from rlhfd.errors import JobFileError, RewardError
from rlhfd.workers.scoring import Sample

NO_TIMEOUT = 0  # math-verify's own deadline is a SIGALRM; ours is the pool's, from outside
MATH_MARKS = ("$", "\\boxed", "\\(", "\\[")

Scorer: TypeAlias = Callable[[str | None, Mapping[str, Any]], float]


@dataclass(frozen=True, kw_only=True)
class RegexReward:
    """`value` where the pattern matches, else `otherwise`.

    With `answer_column` the *last* match must also say what the column says: its group `group` (default the first,
    or the whole match where the pattern has none), both stripped.
    """

    name: str
    file: str = ""
    pattern: re.Pattern[str]
    full_match: bool
    value: float
    otherwise: float
    answer_column: str | None
    group: int | str

    def __call__(self, sample: Sample) -> float:
        """The value for this completion. Raises RewardError if the row lacks the answer column."""
        text = sample.completion
        found = self.pattern.fullmatch(text) if self.full_match else _last(self.pattern, text)
        if self.answer_column is None:
            return self.value if found else self.otherwise
        answer = str(column(sample, self.answer_column, reward=self.name)).strip()
        return self.value if found and (found[self.group] or "").strip() == answer else self.otherwise


def regex_reward(
    *,
    name: str,
    pattern: str,
    full_match: bool,
    value: float,
    otherwise: float,
    answer_column: str | None,
    group: int | str | None,
) -> RegexReward:
    """Compile the pattern. Raises JobFileError for a bad one, or for a group that it does not have."""
    try:
        compiled = re.compile(pattern)
    except re.error as problem:
        raise JobFileError(
            f"reward {name}: the pattern {pattern!r} is not a regular expression: {problem}"
        ) from problem
    chosen = min(1, compiled.groups) if group is None else group
    if chosen not in compiled.groupindex and chosen not in range(compiled.groups + 1):
        raise JobFileError(f"reward {name}: the pattern {pattern!r} has no group {chosen!r}")
    return RegexReward(
        name=name,
        pattern=compiled,
        full_match=full_match,
        value=value,
        otherwise=otherwise,
        answer_column=answer_column,
        group=chosen,
    )


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for found in pattern.finditer(text):  # noqa: B007  # the loop's variable is the result
        pass
    return found


@dataclass(frozen=True, kw_only=True)
class MathReward:
    r"""1.0 where math-verify finds the completion's answer equal to the gold answer, else 0.0.

    A gold answer is read as mathematics as it stands (`\frac{1}{2}`, `12`, `$x^2$`); of a GSM8K solution, the part
    after the last `####`.
    """

    name: str
    file: str = ""
    answer_column: str
    parse: Callable[[str], list[Any]]
    verify: Callable[[list[Any], list[Any]], bool]

    def __call__(self, sample: Sample) -> float:
        """Raises RewardError for a gold answer that is missing or does not parse."""
        answer = str(column(sample, self.answer_column, reward=self.name))
        gold = _gold(self.parse, answer)
        if not any(not isinstance(part, str) for part in gold) or not self.verify(gold, gold):
            raise RewardError(
                f'reward {self.name} can\'t read "{answer}" in column `{self.answer_column}` as a mathematical answer',
                kind="exception",
            )
        return float(self.verify(gold, self.parse(sample.completion)))


def math_reward(*, name: str, answer_column: str) -> MathReward:
    """Import math-verify (half a second) and hand out the reward."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off
    return MathReward(
        name=name,
        answer_column=answer_column,
        parse=functools.partial(cast("Callable[..., list[Any]]", parse), parsing_timeout=NO_TIMEOUT),
        verify=functools.partial(cast("Callable[..., bool]", verify), timeout_seconds=NO_TIMEOUT),
    )


def _gold(parse: Callable[[str], list[Any]], answer: str) -> list[Any]:
    text = answer.rpartition("####")[2].strip()
    if not text or any(mark in text for mark in MATH_MARKS):
        return parse(text)
    return parse(f"${text}$")


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward:
    """The score that the row's own reasoning-gym data set gives the answer.

    The answer is what stands in the last `<answer>…</answer>`, or the whole completion if there is none; with
    `answer_tag` only that tag counts.
    """

    name: str
    file: str = ""
    dataset: str | None
    answer_column: str
    metadata_column: str
    answer_tag: str | None
    extract: Callable[..., str | None]
    scorer_of: Callable[[str], Scorer]

    def __call__(self, sample: Sample) -> float:
        """Raises RewardError if the row is not one of reasoning-gym."""
        entry = self._entry(sample)
        name = self.dataset or entry["metadata"].get("source_dataset")
        try:
            score = self.scorer_of(name)
        except ValueError as problem:
            raise RewardError(
                f"reward {self.name}: reasoning-gym has no data set {name!r}", kind="exception"
            ) from problem
        return score(self._answer(sample.completion), _as_generated(score, entry))

    def _entry(self, sample: Sample) -> dict[str, Any]:
        metadata = column(sample, self.metadata_column, reward=self.name)
        if isinstance(metadata, str):
            metadata = json.loads(metadata)
        if not isinstance(metadata, dict):
            raise RewardError(
                f"reward {self.name}: column `{self.metadata_column}` is no reasoning-gym metadata", kind="exception"
            )
        answer = sample.columns.get(self.answer_column)
        return {"question": sample.columns.get("question"), "answer": answer, "metadata": metadata}

    def _answer(self, completion: str) -> str | None:
        if self.answer_tag:
            return self.extract(completion, tag_name=self.answer_tag)
        tagged = self.extract(completion)
        return completion.strip() if tagged is None else tagged


def reasoning_gym_reward(
    *, name: str, dataset: str | None, answer_column: str, metadata_column: str, answer_tag: str | None
) -> ReasoningGymReward:
    """Import reasoning-gym (three seconds). Raises JobFileError for a data set that it does not have."""
    from reasoning_gym import get_score_answer_fn  # pyright: ignore[reportMissingTypeStubs]
    from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingTypeStubs]

    # its annotation says that the scorer takes no arguments
    scorer_of = functools.cache(cast("Callable[[str], Scorer]", get_score_answer_fn))
    if dataset:
        try:
            scorer_of(dataset)
        except ValueError as problem:
            raise JobFileError(f'reward {name}: reasoning-gym has no data set "{dataset}"') from problem
    return ReasoningGymReward(
        name=name,
        dataset=dataset,
        answer_column=answer_column,
        metadata_column=metadata_column,
        answer_tag=answer_tag,
        extract=extract_answer,
        scorer_of=scorer_of,
    )


def _as_generated(score: Scorer, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as its generator made it. JSON made lists of its tuples, which two data sets compare with tuples.

    The gold answer tells: where it scores under 1.0 as the entry stands and 1.0 with tuples, tuples it was.
    """
    gold = entry["answer"]
    if gold is None or score(gold, entry) >= 1.0:
        return entry
    tupled = {**entry, "metadata": _tupled(entry["metadata"])}
    return tupled if score(gold, tupled) >= 1.0 else entry


def _tupled(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tupled(part) for part in cast("list[Any]", value))
    if isinstance(value, dict):
        return {key: _tupled(part) for key, part in cast("dict[str, Any]", value).items()}
    return value


def column(sample: Sample, name: str, *, reward: str) -> Any:
    """The row's column. Raises RewardError if the row has none of that name, or null in it."""
    value = sample.columns.get(name)
    if value is None:
        raise RewardError(f"reward {reward} needs column `{name}`, which this row does not have", kind="exception")
    return value
