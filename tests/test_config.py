"""A job file is taken whole, or refused in one sentence that names the key, the value and what to do."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.config import JobConfig, job_keys, load_job, load_settings, parse_job, resolved, submit_key
from rlhfd.config_keys import ENGINE_ARGS, FOREIGN, LATER_KEYS, SAMPLING
from rlhfd.core.engine_args import REFUSED, check_engine_args
from rlhfd.errors import JobFileError

REPOSITORY = Path(__file__).parents[1]
SMALLEST = {
    "model": {"model_name_or_path": "org/model"},
    "data": {"source": "jsonl:prompts.jsonl"},
    "reward": [{"type": "math"}],
}
JOB_FILE = """
[model]
model_name_or_path = "org/model"
[data]
source = "jsonl:data/prompts.jsonl"
[[reward]]
type = "function"
path = "rewards.py:right"
"""


def job(**sections) -> dict:
    """The smallest job with keys of some sections set, or whole sections replaced."""
    data = copy.deepcopy(SMALLEST)
    for name, content in sections.items():
        merge = isinstance(content, dict) and isinstance(data.get(name), dict)
        data[name] = {**data[name], **content} if merge else content
    return data


def refusal(data) -> str:
    with pytest.raises(JobFileError) as refused:
        parse_job(data)
    assert refused.value.exit_status == 78
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert "pydantic" not in sentence
    return sentence


@pytest.fixture
def job_dir(tmp_path):
    """A job file with its data and its reward file beside it."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/prompts.jsonl").write_text('{"prompt": "1 + 1 = ?"}\n')
    (tmp_path / "rewards.py").write_text("def right(completion):\n    return 1.0\n")
    (tmp_path / "sums.toml").write_text(JOB_FILE)
    return tmp_path


# --- defaults ------------------------------------------------------------------------------------------------------


def test_only_model_data_and_reward_are_needed():
    config = parse_job(SMALLEST)
    assert (config.rollout.groups_per_step, config.rollout.max_staleness, config.rollout.overcommit) == (8, 4, 2)
    assert (config.algorithm.loss_type, config.algorithm.prox_logp_method) == ("dapo", "loglinear")
    for needed in SMALLEST:
        assert refusal({name: section for name, section in SMALLEST.items() if name != needed}).startswith(needed)


def test_a_synchronous_run_overcommits_nothing_unless_told_to():
    assert parse_job(job(rollout={"max_staleness": 0})).rollout.overcommit == 0
    assert "rollout.overcommit = 3" in refusal(job(rollout={"max_staleness": 0, "overcommit": 3}))


def test_leaving_out_the_decoupled_loss_leaves_out_the_proximal_policy_and_the_other_way_round():
    off = parse_job(job(algorithm={"use_decoupled_loss": False}))
    none = parse_job(job(algorithm={"prox_logp_method": "none"}))
    assert off.algorithm == none.algorithm
    assert "contradicts" in refusal(job(algorithm={"use_decoupled_loss": False, "prox_logp_method": "recompute"}))


def test_a_resolved_job_is_the_same_job():
    config = parse_job(
        job(
            reward=[{"type": "math"}, {"type": "function", "path": "r.py:f", "weight": 2}],
            rollout={"stop_token_ids": [3, 4], "max_staleness": 0},
            learner={"use_peft": True, "lora_target_modules": ["q_proj"]},
            generator={"engine_args": {"gpu_memory_utilization": 0.5}},
        )
    )
    assert parse_job(json.loads(json.dumps(resolved(config)))) == config


# --- unknown keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "wrong", "meant"),
    [
        (job(rollout={"num_generation": 8}), "rollout.num_generation ", "rollout.num_generations"),
        (job(rollout={"learning_rate": 1e-5}), "rollout.learning_rate ", "learner.learning_rate"),
        (job(learner={"lr": 1e-5}), "learner.lr ", "learner.learning_rate"),
        (job(num_generations=8), "num_generations ", "rollout.num_generations"),
        (job(actor_rollout_ref={"rollout": {"n": 4}}), "actor_rollout_ref.rollout.n ", "rollout.num_generations"),
        (job(actor={"eps_clip": 0.2}), "actor.eps_clip ", "algorithm.epsilon"),
        (job(gconfig={"n_samples": 4}), "gconfig.n_samples ", "rollout.num_generations"),
        (job(rollout={"max_head_offpolicyness": 4}), "max_head_offpolicyness ", "rollout.max_staleness"),
        (job(n_samples_per_prompt=8), "n_samples_per_prompt ", "rollout.num_generations"),
        (job(reward=[{"type": "math", "wieght": 1.0}]), "reward.wieght ", "reward.weight"),
        (job(nonsense={}), "nonsense ", "remove it"),
        (job(model={"model_name_or_path": "m", "": 1}), "model. ", "remove it"),
    ],
)
def test_an_unknown_key_is_refused_with_the_key_that_was_meant(data, wrong, meant):
    sentence = refusal(data)
    assert wrong in sentence
    assert meant in sentence


def test_every_foreign_key_leads_to_one_of_ours():
    assert set(FOREIGN.values()) <= set(job_keys())


def test_what_comes_later_is_not_there_yet():
    assert not set(LATER_KEYS) & set(job_keys())


@pytest.mark.parametrize(
    "data",
    [
        job(rollout={"overcommit": "auto"}),
        job(rollout={"overcommit_max": 4}),
        job(rollout={"chunk_tokens": "auto"}),
        job(rollout={"stream_scoring": False}),
        job(rollout={"weight_update": "keep"}),
        job(rollout={"on_stale": "drop"}),
        job(resources={"scorer": "share:learner"}),
        job(scorer={"engine_args": {}}),
        job(algorithm={"loss_type": "ppo"}),
        job(algorithm={"loss_type": "gspo"}),
        job(algorithm={"prox_logp_method": "metrics"}),
        job(algorithm={"beta": 0.01}),
        job(algorithm={"dynamic_sampling": True}),
        job(reward=[{"type": "model", "path": "x"}]),
        job(reward=[{"type": "http"}]),
        job(reward=[{"type": "judge"}]),
        job(report={"to": ["tensorboard"]}),
    ],
)
def test_what_is_designed_and_not_built_is_refused_and_not_ignored(data):
    assert "comes with a later release" in refusal(data)


@pytest.mark.parametrize("name", sorted(SAMPLING))
def test_sampling_that_bends_the_policy_is_refused_with_the_reason(name):
    assert "would not be those of the policy" in refusal(job(rollout={name: 1}))
    assert "would not be those of the policy" in refusal(job(generator={"engine_args": {name: 1}}))


# --- wrong values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (job(rollout={"groups_per_step": "8"}), ["rollout.groups_per_step", '"8"', "a whole number"]),
        (job(rollout={"groups_per_step": 8.0}), ["rollout.groups_per_step", "8.0", "a whole number"]),
        (job(rollout={"groups_per_step": True}), ["rollout.groups_per_step", "true", "a whole number"]),
        (job(learner={"learning_rate": "fast"}), ["learner.learning_rate", '"fast"', "a number"]),
        (job(data={"shuffle": 1}), ["data.shuffle", "1", "true or false"]),
        (job(data={"prompt_column": 1}), ["data.prompt_column", "text in quotes"]),
        (job(rollout=8), ["rollout = 8", "a table"]),
        (job(rollout=[8]), ["rollout = [8]", "a table"]),
        (job(reward={"type": "math"}), ["reward", "a list"]),
        (job(reward=["math"]), ['reward.0 = "math"', "a table"]),
        (job(rollout={"groups_per_step": -1}), ["rollout.groups_per_step = -1", "at least 1"]),
        (job(rollout={"max_completion_length": 0}), ["max_completion_length = 0", "at least 1"]),
        (job(rollout={"num_generations": 1}), ["num_generations = 1", "at least 2"]),
        (job(rollout={"temperature": 0.0}), ["temperature = 0.0", "more than 0"]),
        (job(rollout={"max_staleness": -1}), ["max_staleness = -1", "at least 0"]),
        (job(learner={"adam_beta1": 1.0}), ["adam_beta1 = 1.0", "less than 1"]),
        (job(learner={"learning_rate": float("nan")}), ["learning_rate = NaN", "finite"]),
        (job(checkpoint={"save_total_limit": 1}), ["save_total_limit = 1", "at least 2"]),
        (job(algorithm={"loss_type": "pro"}), ['loss_type = "pro"', "'dapo' or 'grpo'"]),
        (job(algorithm={"minibatches": 9}), ["minibatches = 9", "groups_per_step = 8"]),
        (job(job={"max_steps": 3, "num_train_epochs": 1}), ["max_steps", "num_train_epochs", "one of them"]),
        (job(job={"name": "my job"}), ['job.name = "my job"', "letters"]),
        (job(learner={"warmup_steps": 3}), ["warmup_steps = 3", "constant_with_warmup"]),
        (job(learner={"lora_r": 8}), ["learner.lora_r", "use_peft"]),
        (job(learner={"lora_dropout": 0.1}), ["lora_dropout = 0.1", "policy's"]),
        (job(resources={"learner": 2}), ["resources.learner = 2", "share:generator"]),
        (job(resources={"learner": "share:generator", "generator": 2}), ["resources.generator = 1"]),
        (job(reward=[]), ["reward = []", "at least one"]),
        (job(reward=[{"weight": 1.0}]), ["reward.0.type is missing"]),
        (job(reward=[{"type": "mat"}]), ['reward.0.type = "mat"', "'math'"]),
        (job(reward=[{"type": "function", "path": "rewards.py"}]), ['"rewards.py"', "FILE.py:FUNCTION"]),
        (job(reward=[{"type": "regex", "pattern": "("}]), ['reward.pattern = "("', "regular expression"]),
        (job(reward=[{"type": "regex", "pattern": "x", "group": 1}]), ["reward.group = 1"]),
        (job(reward=[{"type": "math"}, {"type": "math"}]), ['two rewards are called "math"']),
        (job(data={"source": "prompts.jsonl"}), ['"prompts.jsonl"', "jsonl:"]),
        (job(data={"source": "jsonl:"}), ['"jsonl:"']),
        (job(generator={"engine_args": {"tensor_parallel_size": 2}}), ["tensor_parallel_size", "resources.generator"]),
        (job(generator={"engine_args": {"enforce-eager": True}}), ["enforce_eager"]),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(data, words):
    sentence = refusal(data)
    for word in words:
        assert word in sentence


def test_the_engine_refuses_no_flag_that_the_job_file_took():
    for name in {*ENGINE_ARGS, *REFUSED}:
        with pytest.raises(JobFileError, match=name):
            parse_job(job(generator={"engine_args": {name: 1}}))
    taken = {"gpu_memory_utilization": 0.8, "kv_cache_memory_bytes": 1 << 29, "enforce_eager": True}
    check_engine_args(parse_job(job(generator={"engine_args": taken})).generator.engine_args)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def outcome(data) -> JobConfig | str:
    try:
        return parse_job(data)
    except JobFileError as refused:
        return str(refused)


@given(st.sampled_from([*JobConfig.model_fields, "other", *job_keys()]), ANYTHING)
def test_any_value_anywhere_comes_to_a_job_or_to_one_sentence(path, value):
    section, _, key = path.partition(".")
    content = {key: value} if key else value
    taken = outcome(job(**{section: [{"type": "math"} | content] if section == "reward" and key else content}))
    if isinstance(taken, JobConfig):
        assert parse_job(json.loads(json.dumps(resolved(taken)))) == taken
    else:
        assert taken
        assert "\n" not in taken


# --- files ---------------------------------------------------------------------------------------------------------


def test_files_are_found_beside_the_job_file_and_travel_by_name(job_dir):
    config, files = load_job(job_dir / "sums.toml")
    assert files == {"prompts.jsonl": job_dir / "data/prompts.jsonl", "rewards.py": job_dir / "rewards.py"}
    assert config.data.source == "jsonl:prompts.jsonl"
    assert (config.reward[0].path, config.reward[0].file) == ("rewards.py:right", "rewards.py")
    assert config.job.name == "sums"


def test_two_files_of_one_name_travel_under_two(job_dir):
    (job_dir / "other").mkdir()
    (job_dir / "other/rewards.py").write_text("def short(completion):\n    return 1.0\n")
    more = '[[reward]]\ntype = "function"\npath = "other/rewards.py:short"\n'
    (job_dir / "sums.toml").write_text(JOB_FILE + more + more.replace("short", "again"))
    config, files = load_job(job_dir / "sums.toml")
    assert [reward.path for reward in config.reward] == ["rewards.py:right", "rewards-2.py:short", "rewards-2.py:again"]
    assert files["rewards-2.py"] == job_dir / "other/rewards.py"


def test_a_directory_model_is_named_by_its_absolute_path_and_not_carried(job_dir):
    (job_dir / "tiny").mkdir()
    config, files = load_job(job_dir / "sums.toml", ["model.model_name_or_path=tiny"])
    assert config.model.model_name_or_path == str(job_dir / "tiny")
    assert "tiny" not in files


@pytest.mark.parametrize(
    ("assignment", "lost"),
    [
        ("data.source=jsonl:nowhere.jsonl", "nowhere.jsonl"),
        ("data.source=parquet:data", "data"),
        ("reward.0.path=nowhere.py:right", "nowhere.py"),
        ("model.model_name_or_path=./nowhere", "nowhere"),
        ("model.model_name_or_path=/no/where", "/no/where"),
        ("data.source=hf:./nowhere", "nowhere"),
        ('data.source="jsonl:a\\u0000b"', "data.source"),
    ],
)
def test_a_file_that_is_not_there_is_named(job_dir, assignment, lost):
    with pytest.raises(JobFileError) as refused:
        load_job(job_dir / "sums.toml", [assignment])
    assert lost in str(refused.value)
    assert str(job_dir / "sums.toml") in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"), [(b"[job\n", "no valid TOML"), (b"\xff\xfe", "no valid TOML"), (None, "can't be read")]
)
def test_a_job_file_that_is_no_toml_or_not_there_is_named(tmp_path, content, words):
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(JobFileError, match=words):
        load_job(path)


# --- --set ---------------------------------------------------------------------------------------------------------


def test_set_takes_toml_values_and_plain_words(job_dir):
    sets = ["learner.learning_rate=1e-5", "rollout.batch_order=fifo", "rollout.stop_token_ids=[1, 2]", "job.name=a-b"]
    config, _ = load_job(job_dir / "sums.toml", [*sets, "reward.0.weight=2.0", "data.shuffle=false"])
    assert config.learner.learning_rate == 1e-5
    assert (config.rollout.batch_order, config.rollout.stop_token_ids) == ("fifo", (1, 2))
    assert (config.job.name, config.reward[0].weight, config.data.shuffle) == ("a-b", 2.0, False)


@pytest.mark.parametrize("assignment", ["seed", "=3", "job..seed=1", "reward.7.weight=1", "reward.x.weight=1"])
def test_a_set_that_leads_nowhere_is_refused(job_dir, assignment):
    with pytest.raises(JobFileError, match="--set"):
        load_job(job_dir / "sums.toml", [assignment])


def test_a_set_cannot_smuggle_in_a_second_key(job_dir):
    config, _ = load_job(job_dir / "sums.toml", ["data.system_prompt=1\nseed = 7"])
    assert config.data.system_prompt == "1\nseed = 7"


# --- identity ------------------------------------------------------------------------------------------------------


def test_the_submit_key_follows_content_name_and_files():
    config = parse_job(SMALLEST)
    key = submit_key(config, {"prompts.jsonl": "aa"})
    assert key == submit_key(parse_job(resolved(config)), {"prompts.jsonl": "aa"})
    others = [
        submit_key(config, {"prompts.jsonl": "bb"}),
        submit_key(config, {"prompts.jsonl": "aa"}, nonce="again"),
        submit_key(parse_job(job(job={"name": "other"})), {"prompts.jsonl": "aa"}),
        submit_key(parse_job(job(learner={"learning_rate": 2e-6})), {"prompts.jsonl": "aa"}),
    ]
    assert len({key, *others}) == 5


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_have_defaults_and_are_read_from_the_users_file(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert load_settings(home).retries == 3
    (tmp_path / ".config/rlhfd").mkdir(parents=True)
    (tmp_path / ".config/rlhfd/config.toml").write_text("cpu_devices = [[0, 1], [2]]\n[deadlines]\ncanary = 5\n")
    settings = load_settings(home)
    assert settings.cpu_devices == ((0, 1), (2,))
    assert (settings.deadlines.canary, settings.deadlines.engine_start) == (5, 600)


def test_a_named_settings_file_comes_first_and_must_be_there_and_right(tmp_path):
    named = tmp_path / "mine.toml"
    with pytest.raises(JobFileError, match=r"mine\.toml"):
        load_settings({}, named)
    named.write_text("retries = 0\n")
    with pytest.raises(JobFileError, match=r"mine\.toml: retries = 0 is too small"):
        load_settings({}, named)
    named.write_text("retry = 1\n")
    with pytest.raises(JobFileError, match="retry is no key here"):
        load_settings({}, named)


@pytest.mark.parametrize("recipe", sorted((REPOSITORY / "jobs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_reads(recipe):
    config, files = load_job(recipe)
    assert parse_job(resolved(config)) == config
    assert all(path.is_file() for path in files.values())
