"""From a row's prompt to token ids: checked, put into the chat template, tokenised, measured."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, cast

import jinja2
import msgspec

from rlhfd.config import DataSection, JobConfig
from rlhfd.errors import JobFileError
from rlhfd.workers.data import Row
from rlhfd.workers.model_directory import first_line

BATCH = 256  # rows tokenised at once
Message: TypeAlias = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """One row of the snapshot. `text`: JSON of the prompt as the data has it; `columns`: JSON object of the rest."""

    tokens: list[int]
    text: bytes
    columns: bytes
    names: frozenset[str]


@dataclass(kw_only=True)
class Renderer:
    """Turns rows into token ids. `limit`: the longest prompt, tokens; `skipped` counts what was longer."""

    tokenizer: Any
    data: DataSection
    limit: int
    vocab: int
    skipped: int = 0

    @property
    def templated(self) -> bool:
        """Whether prompts go through the tokenizer's chat template."""
        return bool(self.tokenizer.chat_template) and self.data.apply_chat_template

    def render(self, rows: Iterable[Row]) -> Iterator[Rendered]:
        """The rows that fit, in order. Raises JobFileError at the first that can't be used."""
        remaining = iter(rows)
        while batch := list(islice(remaining, BATCH)):
            texts = [self._text(row) for row in batch]
            encoded = self.tokenizer(texts, add_special_tokens=not self.templated)["input_ids"]
            for row, tokens in zip(batch, encoded, strict=True):
                if self._fits(row, tokens):
                    yield _rendered(row, tokens)

    def _text(self, row: Row) -> str:
        """What the model reads, as text."""
        prompt = row.prompt
        if not isinstance(prompt, (str, list)) or not prompt:
            raise JobFileError(
                f"{row.where} has {_named(prompt)} as its prompt: "
                "give text, or a list of chat messages with role and content"
            )
        if not self.templated:
            if not isinstance(prompt, str) or self.data.system_prompt is not None:
                raise JobFileError(self._no_template(row.where, chat=not isinstance(prompt, str)))
            return prompt
        plain = isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}] if plain else _messages(cast("list[Any]", prompt), row.where)
        if self.data.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.data.system_prompt}, *messages]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise JobFileError(
                f"{row.where} does not go through the model's chat template ({first_line(error)}): change the messages"
            ) from error

    def _no_template(self, where: str, *, chat: bool) -> str:
        what = f"{where} is a list of chat messages" if chat else "data.system_prompt is set"
        if self.tokenizer.chat_template:
            return f"{what}, but data.apply_chat_template is false: set it to true"
        return f"{what}, but the model has no chat template: give plain text, or a model that has one"

    def _fits(self, row: Row, tokens: list[int]) -> bool:
        if not tokens:
            raise JobFileError(f"{row.where} comes to no token at all: give a prompt")
        if max(tokens) >= self.vocab:
            raise JobFileError(
                f"{row.where} comes to token {max(tokens)}, which the model's vocabulary of {self.vocab} does not "
                "have: tokenizer and model do not belong together, correct the directory"
            )
        if len(tokens) <= self.limit:
            return True
        if self.data.on_long_prompt == "error":
            raise JobFileError(
                f"{row.where} has {len(tokens)} tokens, over the {self.limit} that the model's length less "
                'rollout.max_completion_length leaves: shorten it, or set data.on_long_prompt = "skip"'
            )
        self.skipped += 1
        return False


def room_for_prompts(job: JobConfig, max_model_len: int) -> int:
    """The longest prompt that leaves room for a whole completion, tokens. Raises JobFileError if there is none."""
    limit = max_model_len - job.rollout.max_completion_length
    if limit < 1:
        raise JobFileError(
            f"rollout.max_completion_length = {job.rollout.max_completion_length} leaves no room for a prompt in the "
            f"{max_model_len} tokens of the model: lower it, or raise model.max_model_len"
        )
    return limit


def _messages(prompt: list[Any], where: str) -> list[Message]:
    messages = [message for value in prompt if (message := _message(value)) is not None]
    if len(messages) != len(prompt):
        raise JobFileError(f"{where} is no list of chat messages: each needs role and content, both text")
    if messages[-1]["role"] == "assistant":
        raise JobFileError(f"{where} ends with the assistant's own message: end it with the user's")
    return messages


def _message(value: Any) -> Message | None:
    """Role and content; other keys may be there and empty, as column formats fill them in."""
    if not isinstance(value, dict):
        return None
    known = {key: text for key, text in cast("dict[str, Any]", value).items() if text is not None}
    whole = known.keys() == {"role", "content"} and all(isinstance(text, str) for text in known.values())
    return known if whole else None


def _rendered(row: Row, tokens: list[int]) -> Rendered:
    try:
        text, columns = (msgspec.json.encode(value, enc_hook=_as_text) for value in (row.prompt, row.columns))
    except (TypeError, ValueError, RecursionError) as error:
        raise JobFileError(
            f"{row.where} has a column that JSON can't hold ({first_line(error)}): leave it out"
        ) from error
    return Rendered(tokens=tokens, text=text, columns=columns, names=frozenset(row.columns))


def _as_text(value: Any) -> str:
    """What only a library's own type can say (a numpy string, a symbol), as text. Raises TypeError for raw objects."""
    if type(value).__str__ is object.__str__:
        raise TypeError(f"a {type(value).__name__}")
    return str(value)


def _named(value: Any) -> str:
    if value is None:
        return "nothing"
    return "an empty text" if value == "" else f"a value of type {type(value).__name__}"
