"""A user's python function as a reward, from the file that was carried at submit.

Its parameter names say how it wants to be called:

* one completion:  `def f(completion, prompt, completion_ids, truncated, answer, …)`, any of them, in any order;
  `completion` is text also where the prompt is a chat.
* a batch, as TRL calls it, when it has a parameter `completions`: `def f(prompts, completions, completion_ids,
  answer, …)`, each a list (here of one), extra columns too. Where the prompt is a chat, so is each completion.

Every extra column of the row is a keyword; `**kwargs` gets all of them. `async def` is awaited.
"""

import asyncio
import difflib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfd.errors import JobFileError, RewardError
from rlhfd.workers.scoring import ForeignError, Sample, only_value, show_source, supervise

SINGLE = frozenset({"completion", "prompt", "completion_ids", "truncated"})
BATCH = frozenset({"completions", "prompts", "completion_ids", "truncated"})


@dataclass(frozen=True, kw_only=True)
class FunctionReward:
    """A function with what it asks for. `file`: the user's file name, as tracebacks show it."""

    name: str
    file: str
    function: Callable[..., object]
    batch: bool
    named: frozenset[str]
    required: frozenset[str]
    everything: bool

    def __call__(self, sample: Sample) -> object:
        """What the function returns for this rollout, awaited and taken out of its batch of one."""
        offered = _batch_arguments(sample) if self.batch else _single_arguments(sample)
        if missing := sorted(self.required - offered.keys()):
            raise RewardError(
                f"reward {self.name} needs {_quoted(missing)}, which this row does not have", kind="exception"
            )
        arguments = offered if self.everything else {key: offered[key] for key in self.named & offered.keys()}
        returned = self.function(**arguments)
        if inspect.isawaitable(returned):
            returned = _event_loop().run(_awaited(returned))
        return only_value(returned, name=self.name) if self.batch else returned


def load_function(*, name: str, path: str, source: Path, columns: Collection[str] | None) -> FunctionReward:
    """The function that `path` (`rewards.py:exact_number`) names, from its carried bytes at `source`.

    `columns`: what every row has, None if not known. Raises JobFileError if the file can't be imported, has no such
    function, or the function asks for something that no row has.
    """
    file, _, function_name = path.rpartition(":")
    if not file or not function_name:
        raise JobFileError(f'reward path "{path}" must be a file and a function, as in "rewards.py:exact_number"')
    display = Path(file).name
    module = _load_module(source, display)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise JobFileError(f"{display} has no function {function_name}{_near_miss(function_name, module)}")
    return _reward_of(function, name=name or function_name, file=display, columns=columns)


@functools.cache
def _load_module(source: Path, display: str) -> ModuleType:
    """The user's file, run once a process however many rewards it has. Raises JobFileError."""
    try:
        data = source.read_bytes()
    except OSError as problem:
        raise JobFileError(f"reward file {display} can't be read: {problem.strerror}") from problem
    module = ModuleType(f"carried_{Path(display).stem}")  # a user's random.py must not shadow the library's
    module.__file__ = str(source)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    try:
        supervise(lambda: _run(data, module, display), file=display)
    except ForeignError as problem:
        raise JobFileError(f"reward file {display} does not import: {problem}{_import_hint(problem)}") from problem
    return module


def _run(data: bytes, module: ModuleType, display: str) -> None:
    source = importlib.util.decode_source(data)
    show_source(display, source)
    exec(compile(source, display, "exec"), module.__dict__)  # noqa: S102  # running the user's file is the purpose


def _import_hint(problem: ForeignError) -> str:
    if not isinstance(problem.__cause__, ModuleNotFoundError):
        return ""
    return "; only the file itself is carried at submit, beside it installed packages can be imported"


def _near_miss(name: str, module: ModuleType) -> str:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, functions, n=1)
    return f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(functions)) or 'none'}"


def _reward_of(
    function: Callable[..., object], *, name: str, file: str, columns: Collection[str] | None
) -> FunctionReward:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as problem:
        raise JobFileError(f"reward {name} of {file} shows no parameters, so it can't be called by name") from problem
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise JobFileError(f"reward {name} of {file}: {_quoted(positional)} can't be positional-only; all go by name")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = frozenset(p.name for p in by_name)
    reward = FunctionReward(
        name=name,
        file=file,
        function=function,
        batch="completions" in named,
        named=named,
        required=frozenset(p.name for p in by_name if p.default is p.empty),
        everything=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
    if columns is not None:
        _refuse_unknown(reward, columns)
    return reward


def _refuse_unknown(reward: FunctionReward, columns: Collection[str]) -> None:
    given = BATCH if reward.batch else SINGLE
    if unknown := sorted(reward.required - given - set(columns)):
        has = ", ".join(sorted(columns)) or "it has no extra ones"
        raise JobFileError(
            f"reward {reward.name} of {reward.file} asks for {_quoted(unknown)}, which is neither one of "
            f"{', '.join(sorted(given))} nor a column of the data ({has})"
        )


def _single_arguments(sample: Sample) -> dict[str, Any]:
    return {
        **sample.columns,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "completion_ids": sample.completion_ids,
        "truncated": sample.truncated,
    }


def _batch_arguments(sample: Sample) -> dict[str, Any]:
    chat = not isinstance(sample.prompt, str)
    completion = [{"role": "assistant", "content": sample.completion}] if chat else sample.completion
    return {
        **{key: [value] for key, value in sample.columns.items()},
        "prompts": [sample.prompt],
        "completions": [completion],
        "completion_ids": [sample.completion_ids],
        "truncated": [sample.truncated],
    }


async def _awaited(returned: Awaitable[object]) -> object:
    return await returned


@functools.cache
def _event_loop() -> asyncio.Runner:
    """One loop for the life of the worker, so that what a function keeps open between calls stays usable."""
    return asyncio.Runner()


def _quoted(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
