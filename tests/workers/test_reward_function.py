"""A user's function is called as its parameters ask, and what it does wrong is said in a sentence."""

import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.errors import JobFileError, RewardError
from rlhfd.workers.reward_function import load_function
from rlhfd.workers.scoring import Sample, as_number, evaluate

CHAT = [{"role": "user", "content": "2+3?"}]


def a_sample(**changes):
    fields = {
        "prompt": "2+3=",
        "completion": " 5",
        "completion_ids": [7, 8],
        "truncated": False,
        "columns": {"answer": "5", "level": 1},
    }
    return Sample(**{**fields, **changes})


@pytest.fixture
def load(tmp_path: Path):
    def loaded(source, function="f", columns=("answer", "level"), name=""):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.carried"
        path.write_text(source)
        return load_function(name=name, path=f"my/rewards.py:{function}", source=path, columns=columns)

    return loaded


@pytest.mark.parametrize(
    ("parameters", "value"),
    [
        ("completion", "completion == ' 5'"),
        ("completion, answer", "completion.strip() == answer"),
        ("prompt, completion_ids, truncated", "(prompt, completion_ids, truncated) == ('2+3=', [7, 8], False)"),
        ("level, unknown=4", "level + unknown == 5"),
        ("**kwargs", "kwargs['answer'] == '5' and kwargs['completion'] == ' 5'"),
        ("completion, *, answer", "answer == '5'"),
    ],
)
def test_a_single_function_gets_what_it_names(load, parameters, value):
    reward = load(f"def f({parameters}):\n    return {value}\n")
    assert evaluate(reward, a_sample()) == 1.0


def test_a_single_function_gets_the_chat_as_prompt_and_text_as_completion(load):
    reward = load("def f(prompt, completion): return prompt[0]['role'] == 'user' and completion == ' 5'")
    assert evaluate(reward, a_sample(prompt=CHAT)) == 1.0


def test_a_batch_function_gets_lists_of_one_as_trl_gives_them(load):
    reward = load(
        "def f(prompts, completions, completion_ids, answer, **kwargs):\n"
        "    assert kwargs == {'level': [1], 'truncated': [False]}, kwargs\n"
        "    return [float(p == '2+3=' and c == ' 5' and i == [7, 8] and a == '5')\n"
        "            for p, c, i, a in zip(prompts, completions, completion_ids, answer, strict=True)]\n"
    )
    assert evaluate(reward, a_sample()) == 1.0


def test_a_batch_function_gets_messages_where_the_prompt_is_a_chat(load):
    reward = load("def f(prompts, completions): return [completions == [[{'role': 'assistant', 'content': ' 5'}]]]")
    assert evaluate(reward, a_sample(prompt=CHAT)) == 1.0


@pytest.mark.parametrize("returned", ["0.5", "[0.5]", "(0.5,)", "numpy.array([0.5])", "torch.tensor([0.5])"])
def test_a_batch_may_return_any_sequence_of_one(load, returned):
    reward = load(f"import numpy, torch\ndef f(completions): return {returned}")
    if returned == "0.5":
        with pytest.raises(RewardError, match="must return a list with one number per completion") as caught:
            evaluate(reward, a_sample())
        assert caught.value.kind == "wrong_type"
    else:
        assert evaluate(reward, a_sample()) == 0.5


@pytest.mark.parametrize(
    ("returned", "says"), [("[]", "0 values"), ("[1, 2]", "2 values"), ("'a'", "list"), ("{}", "list")]
)
def test_a_batch_of_the_wrong_size_or_kind_is_an_error(load, returned, says):
    reward = load(f"def f(completions): return {returned}")
    with pytest.raises(RewardError, match=says) as caught:
        evaluate(reward, a_sample())
    assert caught.value.kind == "wrong_type"


def test_async_functions_are_awaited_on_one_loop(load):
    source = (
        "import asyncio\nloops = set()\n"
        "async def f(completion):\n"
        "    loops.add(asyncio.get_running_loop())\n    await asyncio.sleep(0)\n    return len(loops)\n"
    )
    reward = load(source)
    assert [evaluate(reward, a_sample()), evaluate(reward, a_sample())] == [1.0, 1.0]


def test_an_async_function_that_exits_leaves_the_loop_usable(load):
    source = "import sys\nasync def f(completion):\n    sys.exit(3)\nasync def g(completion): return 1\n"
    with pytest.raises(RewardError, match=r"SystemExit: 3 \(rewards.py, line 3\)"):
        evaluate(load(source), a_sample())
    assert evaluate(load(source, "g"), a_sample()) == 1.0


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("raise ValueError('no number')", r"ValueError: no number \(rewards.py, line 2\)"),
        ("import sys; sys.exit('bye')", r"SystemExit: bye \(rewards.py, line 2\)"),
        ("raise KeyboardInterrupt", r"KeyboardInterrupt \(rewards.py, line 2\)"),
        ("raise GeneratorExit", r"GeneratorExit"),
        ("return f(completion)", r"RecursionError: .* \(rewards.py, line 2\)"),
        ("return int('x')", r"ValueError: invalid literal .* \(rewards.py, line 2\)"),
        ("raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()", r"E: .* \(rewards.py, line 2\)"),
        ("import json; json.loads('{')", r"JSONDecodeError: .* \(rewards.py, line 2\)"),
        ("raise ValueError('x' * 10_000)", r"xxx… \(rewards.py, line 2\)"),
    ],
)
def test_whatever_is_raised_is_named_with_its_line_in_the_users_file(load, statement, says):
    reward = load(f"def f(completion):\n    {statement}\n")
    with pytest.raises(RewardError, match=f"reward f raised .*{says}") as caught:
        evaluate(reward, a_sample())
    assert caught.value.kind == "exception"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(0.5), np.int64(3), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5")]
)
def test_any_real_scalar_is_a_reward(value):
    assert as_number(value, name="r") == float(value)


@pytest.mark.parametrize("value", [None, "1", b"1", [1.0], (1,), {}, 1j, object(), np.array([1.0]), torch.ones(2), len])
def test_anything_else_is_of_the_wrong_type(value):
    with pytest.raises(RewardError, match=r"reward r returned .* not one number") as caught:
        as_number(value, name="r")
    assert caught.value.kind == "wrong_type"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), 10**400])
def test_what_is_not_finite_is_no_reward(value):
    with pytest.raises(RewardError, match="not a finite number") as caught:
        as_number(value, name="r")
    assert caught.value.kind == "not_finite"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_floats_pass_unchanged(value):
    assert as_number(value, name="r") == value


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(completion, anwser): return 1", r"f of rewards.py asks for `anwser`, .*\(answer, level\)"),
        ("def f(prompts, answer): return 1", r"asks for `prompts`"),
        ("def f(completions, completion): return 1", r"asks for `completion`"),
        ("def f(completion, /): return 1", r"`completion` can't be positional-only"),
        ("def g(completion): return 1", r"no function f; it has g"),
        ("def ff(completion): return 1", r"no function f; did you mean ff\?"),
        ("f = 3", r"no function f; it has none"),
        ("f = max", r"shows no parameters"),
        ("x = 1\nimport nowhere_to_be_found\n", r"line 2\); only the file itself is carried"),
        ("def f(completion)\n    return 1\n", r"SyntaxError: .* \(rewards.py, line 1\)"),
        ("raise SystemExit(0)", r"does not import: SystemExit: 0 \(rewards.py, line 1\)"),
        ("\n\nimport json\njson.loads('')\n", r"JSONDecodeError: .* \(rewards.py, line 4\)"),
        ("# -*- coding: nonsense -*-\n", r"does not import: .*nonsense"),
        ("x = '\0'", r"does not import: .*null bytes"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused_with_the_reason(load, source, says):
    with pytest.raises(JobFileError, match=says):
        load(source)


def test_parameters_are_checked_row_by_row_where_the_columns_are_not_known(load):
    reward = load("def f(completion, extra): return extra", columns=None)
    assert evaluate(reward, a_sample(columns={"extra": 3})) == 3.0
    with pytest.raises(RewardError, match="needs `extra`, which this row does not have") as caught:
        evaluate(reward, a_sample())
    assert caught.value.kind == "exception"


def test_a_path_without_a_function_is_refused(tmp_path):
    with pytest.raises(JobFileError, match="must be a file and a function"):
        load_function(name="", path="rewards.py", source=tmp_path / "x", columns=None)


def test_a_carried_file_that_is_gone_is_refused(tmp_path):
    with pytest.raises(JobFileError, match=r"rewards.py can't be read: No such file"):
        load_function(name="", path="rewards.py:f", source=tmp_path / "gone", columns=None)


def test_two_rewards_of_one_file_share_its_module(tmp_path):
    source = tmp_path / "carried"
    source.write_text("calls = []\ndef f(completion): calls.append(1); return len(calls)\ng = f\n")
    f, g = (load_function(name="", path=f"r.py:{name}", source=source, columns=None) for name in "fg")
    assert [evaluate(f, a_sample()), evaluate(g, a_sample())] == [1.0, 2.0]


def test_a_file_named_like_a_library_does_not_shadow_it(tmp_path):
    source = tmp_path / "carried"
    source.write_text(
        "from __future__ import annotations\nimport random, dataclasses\n"
        "@dataclasses.dataclass\nclass Mine:\n    x: int = 1\n"
        "def f(completion): return Mine().x if random.random() < 1 else 0\n"
    )
    reward = load_function(name="", path="random.py:f", source=source, columns=None)
    assert evaluate(reward, a_sample()) == 1.0
