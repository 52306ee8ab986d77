"""Rows of every kind of data reach the snapshot whole, or are refused by their number."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhfd.config import parse_job
from rlhfd.errors import JobFileError
from rlhfd.workers import data
from rlhfd.workers.inspect import load_tokenizer
from rlhfd.workers.model_directory import Permissions
from rlhfd.workers.render import Renderer, room_for_prompts

SUM = {"prompt": "1 + 1 = ?", "answer": "2"}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?"}]
NOTHING = Permissions(download=False, remote_code=False)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(tiny_model, trust=False)


@pytest.fixture
def bare_tokenizer(tiny_model):
    """The same without a chat template."""
    bare = load_tokenizer(tiny_model, trust=False)
    bare.chat_template = None
    return bare


@pytest.fixture
def jsonl(tmp_path):
    """Write rows (objects, or lines as they are) to prompts.jsonl."""

    def write(*rows) -> Path:
        path = tmp_path / "prompts.jsonl"
        lines = [row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows]
        path.write_bytes(b"".join(line.encode() + b"\n" if isinstance(line, str) else line + b"\n" for line in lines))
        return path

    return write


def job_of(source: str, *, reward=None, rollout=None, **of_data):
    function = {"type": "function", "path": "r.py:f"}
    return parse_job(
        {
            "model": {"model_name_or_path": "tiny"},
            "data": {"source": source, **of_data},
            "reward": [reward or function],
            "rollout": rollout or {},
        }
    )


def rows_of(path: Path | None, source: str, **more):
    files = {} if path is None else {path.name: path}
    library = data.Library(files=files, allowed=NOTHING, cache_dir=Path("/nowhere"))
    return list(data.rows(job_of(source, **more), library))


def rendered(tokenizer, path: Path, *, limit: int = 200, **of_data):
    job = job_of("jsonl:prompts.jsonl", **of_data)
    library = data.Library(files={path.name: path}, allowed=NOTHING, cache_dir=Path("/nowhere"))
    renderer = Renderer(tokenizer=tokenizer, data=job.data, limit=limit, vocab=512)
    return list(renderer.render(data.rows(job, library))), renderer


# --- reading -------------------------------------------------------------------------------------------------------


def test_jsonl_rows_carry_their_other_columns(jsonl):
    (row,) = rows_of(jsonl(SUM), "jsonl:prompts.jsonl")
    assert (row.where, row.prompt, row.columns) == ("prompts.jsonl row 1", "1 + 1 = ?", {"answer": "2"})


def test_empty_lines_are_left_out_and_still_counted(jsonl):
    rows = rows_of(jsonl("\ufeff" + json.dumps(SUM), "", "  ", SUM), "jsonl:prompts.jsonl")
    assert [row.where for row in rows] == ["prompts.jsonl row 1", "prompts.jsonl row 4"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"question": "?", "answer": "2"}, "prompts.jsonl row 17 has no column 'prompt'"),
        ({}, "prompts.jsonl row 17 has no column 'prompt'"),
        ("{", "prompts.jsonl row 17 is no JSON"),
        (b"\xff\xfe", "prompts.jsonl row 17 is no JSON"),
        ("[" * 100_000, "prompts.jsonl row 17 is no JSON"),
        ('["1 + 1"]', "prompts.jsonl row 17 is no JSON object"),
    ],
)
def test_a_bad_line_is_named_by_its_number(jsonl, bad, words):
    with pytest.raises(JobFileError, match=words):
        rows_of(jsonl(*[SUM] * 16, bad, *[SUM] * 3), "jsonl:prompts.jsonl")


def test_rows_are_read_one_by_one(jsonl):
    library = data.Library(files={"prompts.jsonl": jsonl(SUM, "{")}, allowed=NOTHING, cache_dir=Path("/nowhere"))
    rows = data.rows(job_of("jsonl:prompts.jsonl"), library)
    assert next(rows).prompt == SUM["prompt"]
    with pytest.raises(JobFileError, match="row 2"):
        next(rows)


def test_another_prompt_column_may_be_named(jsonl):
    (row,) = rows_of(jsonl({"q": "?", "prompt": "p"}), "jsonl:prompts.jsonl", prompt_column="q")
    assert (row.prompt, row.columns) == ("?", {"prompt": "p"})


@pytest.mark.parametrize(
    "reward", [{"type": "math"}, {"type": "regex", "pattern": "(.)", "answer_column": "answer"}], ids=["math", "regex"]
)
@pytest.mark.parametrize("bad", [{"prompt": "?"}, {"prompt": "?", "answer": None}], ids=["absent", "null"])
def test_a_row_without_the_answer_that_a_reward_reads_is_named(jsonl, reward, bad):
    with pytest.raises(JobFileError, match=f"row 2 has no column 'answer', which the reward {reward['type']} reads"):
        rows_of(jsonl(SUM, bad), "jsonl:prompts.jsonl", reward=reward)


def test_parquet_rows_are_the_same_rows(tmp_path):
    path = tmp_path / "prompts.parquet"
    table = [{"prompt": CHAT, "answer": str(n), "points": n / 2} for n in range(600)]
    parquet.write_table(pa.Table.from_pylist(table), path)
    rows = rows_of(path, "parquet:prompts.parquet")
    assert [row.prompt for row in rows] == [CHAT] * 600
    assert rows[599].columns == {"answer": "599", "points": 299.5}
    assert rows[599].where == "prompts.parquet row 600"


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "prompts.parquet"
    path.write_text("prompt\n")
    with pytest.raises(JobFileError, match=r"prompts\.parquet is no Parquet file"):
        rows_of(path, "parquet:prompts.parquet")


def test_reasoning_gym_makes_the_same_puzzles_from_the_same_seed():
    source = "reasoning_gym:chain_sum?size=3&seed=7"
    first, again = rows_of(None, source), rows_of(None, source)
    other = rows_of(None, "reasoning_gym:chain_sum", source_args={"size": 3, "seed": 8})
    assert [row.prompt for row in first] == [row.prompt for row in again] != [row.prompt for row in other]
    assert first[0].columns["metadata"]["source_dataset"] == "chain_sum"
    assert first[0].columns["question"] == first[0].prompt


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("reasoning_gym:chain_sums", {}, "did you mean chain_sum"),
        ("reasoning_gym:chain_sum", {"sizes": 3}, "sizes"),
        ("reasoning_gym:chain_sum", {"min_terms": -1}, "refuses the arguments"),
        ("reasoning_gym:chain_sum?size=3", {"size": 4}, "size stands both"),
    ],
)
def test_puzzles_that_cannot_be_made_are_refused(source, args, words):
    with pytest.raises(JobFileError, match=words):
        rows_of(None, source, source_args=args)


# --- rendering -----------------------------------------------------------------------------------------------------


def test_a_string_becomes_one_user_message(tokenizer, jsonl):
    (row,), _ = rendered(tokenizer, jsonl(SUM))
    assert tokenizer.decode(row.tokens) == "<|im_start|>user\n1 + 1 = ?<|im_end|>\n<|im_start|>assistant\n"
    assert (json.loads(row.text), json.loads(row.columns)) == ("1 + 1 = ?", {"answer": "2"})


def test_a_string_stays_as_it_is_without_a_template_or_when_the_job_says_so(tokenizer, bare_tokenizer, jsonl):
    path = jsonl(SUM)
    (plain,), _ = rendered(tokenizer, path, apply_chat_template=False)
    (bare,), _ = rendered(bare_tokenizer, path)
    assert tokenizer.decode(plain.tokens) == tokenizer.decode(bare.tokens) == "1 + 1 = ?"


def test_chat_messages_go_through_the_template_as_they_are(tokenizer, jsonl):
    (row,), _ = rendered(tokenizer, jsonl({"prompt": CHAT}), system_prompt="Not this one.")
    assert "Be brief." in tokenizer.decode(row.tokens)
    assert "Not this one." not in tokenizer.decode(row.tokens)
    assert json.loads(row.text) == CHAT


def test_a_system_prompt_is_put_in_front_and_does_not_reach_the_rewards(tokenizer, jsonl):
    (row,), _ = rendered(tokenizer, jsonl(SUM), system_prompt="Think.")
    assert tokenizer.decode(row.tokens).startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n")
    assert json.loads(row.text) == "1 + 1 = ?"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "nothing as its prompt"),
        (3, "a value of type int"),
        ("", "an empty text"),
        ([], "type list"),
        ({"role": "user", "content": "?"}, "type dict"),
        (["hello"], "no list of chat messages"),
        ([{"role": "user"}], "no list of chat messages"),
        ([{"role": "user", "content": ["?"]}], "no list of chat messages"),
        ([*CHAT, {"role": "assistant", "content": "2"}], "ends with the assistant's own message"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_chat_is_named(tokenizer, jsonl, prompt, words):
    with pytest.raises(JobFileError, match=f"row 2 .*{words}"):
        rendered(tokenizer, jsonl(SUM, {"prompt": prompt}))


def test_columns_of_messages_that_a_table_filled_with_nulls_are_no_mistake(tokenizer, jsonl):
    (row,), _ = rendered(tokenizer, jsonl({"prompt": [{"role": "user", "content": "?", "name": None}]}))
    assert "?" in tokenizer.decode(row.tokens)


def test_chat_needs_a_template(bare_tokenizer, tokenizer, jsonl):
    path = jsonl({"prompt": CHAT})
    with pytest.raises(JobFileError, match="the model has no chat template"):
        rendered(bare_tokenizer, path)
    with pytest.raises(JobFileError, match="apply_chat_template is false"):
        rendered(tokenizer, path, apply_chat_template=False)
    with pytest.raises(JobFileError, match=r"data\.system_prompt is set, but the model has no chat template"):
        rendered(bare_tokenizer, jsonl(SUM), system_prompt="Think.")


def test_messages_that_the_template_refuses_are_named(tokenizer, jsonl, monkeypatch):
    strict = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", strict)
    with pytest.raises(JobFileError, match=r"row 1 does not go through .*roles must alternate"):
        rendered(tokenizer, jsonl({"prompt": CHAT}))


def test_a_prompt_too_long_is_refused_by_its_row_or_skipped_and_counted(tokenizer, jsonl):
    long = {"prompt": "1 + " * 100}
    path = jsonl(SUM, long, SUM)
    with pytest.raises(JobFileError, match=r"prompts\.jsonl row 2 has \d+ tokens, over the 60"):
        rendered(tokenizer, path, limit=60)
    kept, renderer = rendered(tokenizer, path, limit=60, on_long_prompt="skip")
    assert (len(kept), renderer.skipped) == (2, 1)


def test_a_prompt_exactly_as_long_as_there_is_room_is_kept(tokenizer, jsonl):
    path = jsonl(SUM)
    (row,), _ = rendered(tokenizer, path)
    assert len(rendered(tokenizer, path, limit=len(row.tokens))[0]) == 1
    with pytest.raises(JobFileError, match="over the"):
        rendered(tokenizer, path, limit=len(row.tokens) - 1)


def test_completions_must_leave_room_for_a_prompt():
    job = job_of("jsonl:p", rollout={"max_completion_length": 100})
    assert room_for_prompts(job, 101) == 1
    with pytest.raises(JobFileError, match="max_completion_length = 100 leaves no room"):
        room_for_prompts(job, 100)


def test_a_token_beyond_the_vocabulary_is_refused(tokenizer, jsonl):
    job = job_of("jsonl:prompts.jsonl")
    renderer = Renderer(tokenizer=tokenizer, data=job.data, limit=200, vocab=20)
    library = data.Library(files={"prompts.jsonl": jsonl(SUM)}, allowed=NOTHING, cache_dir=Path("/nowhere"))
    with pytest.raises(JobFileError, match="vocabulary of 20"):
        list(renderer.render(data.rows(job, library)))
