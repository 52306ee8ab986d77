"""What `check` derives is what the job would do."""

import pytest

from rlhfd.config import parse_job
from rlhfd.core.estimate import estimate, staleness, steps_of

GIB = 1024**3
SMOLLM2 = {
    "parameters": 134_515_008,
    "layers": 30,
    "hidden": 576,
    "kv_heads": 3,
    "head_dim": 64,
    "vocab": 49_152,
    "max_model_len": 8192,
}
QWEN = {
    "parameters": 1_543_714_304,
    "layers": 28,
    "hidden": 1536,
    "kv_heads": 2,
    "head_dim": 128,
    "vocab": 151_936,
    "max_model_len": 32_768,
}


def job(**sections):
    return parse_job(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"source": "jsonl:p"},
            "reward": [{"type": "math"}],
            **sections,
        }
    )


def facts(model=SMOLLM2, rows=100, longest=50):
    return {"model": model, "prompts": {"rows": rows, "tokens_max": longest}}


@pytest.mark.parametrize(
    ("length", "rows", "steps"),
    [
        ({"max_steps": 30}, 100, 30),
        ({}, 100, 13),
        ({"num_train_epochs": 2.0}, 100, 25),
        ({"num_train_epochs": 0.01}, 100, 1),
        ({}, 1, 1),
    ],
)
def test_steps_are_given_or_follow_from_the_epochs(length, rows, steps):
    assert steps_of(job(job=length), rows) == steps


def test_counts_are_products():
    derived = estimate(job(job={"max_steps": 30}, rollout={"num_generations": 4, "max_completion_length": 10}), facts())
    assert (derived.prompts, derived.completions, derived.tokens) == (240, 960, 9600)
    assert derived.epochs == pytest.approx(2.4)


def test_staleness_names_the_dial_and_the_bound():
    assert "about 1 + 2/8 = 1.25 steps, never over 4" in staleness(job())
    assert "1 + 0/8 = 1.00" in staleness(job(rollout={"overcommit": 0}))
    assert staleness(job(rollout={"max_staleness": 0})).startswith("synchronous")


def test_an_overcommit_beyond_what_can_be_trained_in_time_counts_as_cut():
    few = job(rollout={"groups_per_step": 2, "max_staleness": 1, "overcommit": 50})
    assert estimate(few, facts()).overcommit == 2
    assert "= 1.00 steps, never over 1" in staleness(few)


def test_full_fine_tuning_holds_sixteen_bytes_a_parameter_and_an_adapter_little_more_than_the_weights():
    small = {"tokens_per_micro_batch": 1}
    full = estimate(job(learner=small), facts(QWEN))
    adapter = estimate(job(learner={**small, "use_peft": True}), facts(QWEN))
    assert full.memory["learner"] == pytest.approx(16 * QWEN["parameters"], rel=0.01)
    assert adapter.memory["learner"] == pytest.approx(4 * QWEN["parameters"], rel=0.06)
    assert adapter.trained_parameters < QWEN["parameters"] / 50
    assert adapter.disk < full.disk


def test_checkpointing_and_smaller_micro_batches_save_memory():
    wide = estimate(job(), facts()).memory["learner"]
    assert estimate(job(learner={"gradient_checkpointing": True}), facts()).memory["learner"] < 0.7 * wide
    assert estimate(job(learner={"tokens_per_micro_batch": 1024}), facts()).memory["learner"] < 0.6 * wide


def test_the_generator_holds_weights_and_the_cache_of_what_is_in_flight():
    one = {"groups_per_step": 1, "num_generations": 2, "overcommit": 0, "max_completion_length": 50}
    cache = 2 * 30 * 3 * 64 * 2 * 100 * 2
    assert estimate(job(rollout=one), facts()).memory["generator"] == 2 * SMOLLM2["parameters"] + cache
    float32 = estimate(job(rollout=one, model={"model_name_or_path": "m", "dtype": "float32"}), facts())
    assert float32.memory["generator"] == 4 * SMOLLM2["parameters"] + 2 * cache
    many = estimate(job(rollout={"groups_per_step": 10_000}), facts()).memory["generator"]
    assert many < 3 * GIB  # never more streams than generator.max_num_seqs
