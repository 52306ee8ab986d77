"""Every setting that changes what a step is, each in a real step of the tiny model, checked by what it left behind.

Four jobs share the settings out among them, on one daemon with the fake engine; the learner and the rewards are real.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from rlhfd.config import load_job
from rlhfd.pipeline.prompts import Snapshot
from tests.daemon import REPOSITORY, Daemon, write_job

STOPS = list(range(4, 44))  # a twelfth of the vocabulary, so that completions differ in length
LENGTH = 24
SAMPLED = {"max_completion_length": LENGTH, "stop_token_ids": STOPS, "groups_per_step": 2, "num_generations": 4}
WEIGHTS = {"vowels": 2.0, "an_e": -0.5}

JOBS: dict[str, dict[str, Any]] = {
    "adapter": {  # LoRA · checkpointing · parquet · chat · two rewards · grpo · recompute · minibatches · no staleness
        "job": {"max_steps": 2},
        "data": {"source": "parquet:chats.parquet", "prompt_column": "messages", "system_prompt": "Be brief."},
        "reward": [
            {"type": "function", "path": "rewards.py:vowels", "weight": WEIGHTS["vowels"]},
            {"type": "regex", "pattern": "e", "name": "an_e", "weight": WEIGHTS["an_e"]},
        ],
        "rollout": {**SAMPLED, "max_staleness": 0},
        "algorithm": {"loss_type": "grpo", "prox_logp_method": "recompute", "minibatches": 2, "num_iterations": 2},
        "learner": {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "gradient_checkpointing": True},
    },
    "interpolated": {  # full fine-tune · jsonl · dapo · loglinear · overlap
        "job": {"max_steps": 3},
        "data": {"shuffle": False},
        "rollout": {**SAMPLED, "max_staleness": 4, "overcommit": 2},
        "algorithm": {"loss_type": "dapo", "prox_logp_method": "loglinear", "zero_staleness": "theta"},
    },
    "alternating": {  # two devices, and yet no generation while the learner works · the behaviour policy is proximal
        "job": {"max_steps": 3},
        "data": {"apply_chat_template": False},
        "rollout": {**SAMPLED, "max_staleness": 1, "overcommit": 0, "overlap_learning": False},
        "algorithm": {"prox_logp_method": "none"},
    },
    "sharing": {  # generator and learner take turns on one device
        "job": {"max_steps": 2},
        "rollout": {**SAMPLED, "max_staleness": 4, "overcommit": 0},
        "resources": {"learner": "share:generator"},
    },
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one job left behind. `steps`: metrics; `recorded`: rows of the redo log; `uses`: its rollouts' rows.

    `trained`: names of the weights in the checkpoint; `rendered`: the prompts as the model reads them, by row.
    """

    steps: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    recorded: list[Mapping[str, Any]]
    uses: list[Mapping[str, Any]]
    devices: list[str]
    trained: set[str]
    rendered: list[str]

    def losses(self) -> list[float]:
        """Of the first step, one an optimiser step."""
        return json.loads(self.recorded[0]["fingerprint"])["losses"]

    def first_minibatch(self) -> list[Mapping[str, Any]]:
        """The rollouts of the very first optimiser step: policy and behaviour are still the same there."""
        return [use for use in self.uses if (use["n"], use["minibatch"]) == (1, 0)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Ran]:
    """All the jobs, run to their ends."""
    directory = tmp_path_factory.mktemp("matrix")
    with Daemon(directory / "state") as daemon:
        ids: dict[str, int] = {}
        for name, changes in JOBS.items():
            kept = {"job": {"name": name, **changes["job"]}, "checkpoint": {"save_steps": 100}}  # with all their rows
            job = write_job(directory / name, tiny_model, **{**changes, **kept})
            write_chats(directory / name / "chats.parquet")
            ids[name] = daemon.submit(job)
        for name, job_id in ids.items():
            status = daemon.wait(job_id, {"done", "failed"})
            assert status["state"] == "done", (name, status)
        return {name: read(daemon, job_id) for name, job_id in ids.items()}


def write_chats(path: Path) -> None:
    chats = [[{"role": "user", "content": f"sing {number}"}] for number in range(6)]
    table = pa.table({"messages": chats, "answer": [str(number) for number in range(6)]})
    pq.write_table(table, path)


def read(daemon: Daemon, job_id: int) -> Ran:
    rows = daemon.rows(
        "SELECT step.n, step_rollout.*, rollout.n_tokens FROM step_rollout JOIN step ON step.id = step_id "
        "JOIN rollout ON rollout.id = rollout_id WHERE step.job_id = ?",
        job_id,
    )
    (started,) = [event for event in daemon.events(job_id) if event["kind"] == "started"]
    return Ran(
        steps=daemon.get(f"/v1/jobs/{job_id}/metrics"),
        samples=json.loads(daemon.cli("samples", job_id, "-n", 100, "--json").stdout),
        recorded=daemon.rows("SELECT * FROM step WHERE job_id = ? ORDER BY n", job_id),
        uses=rows,
        devices=started["devices"],
        trained=tensors(daemon.state_dir / "jobs" / str(job_id) / "checkpoints"),
        rendered=rendered(daemon, job_id),
    )


def rendered(daemon: Daemon, job_id: int) -> list[str]:
    (job,) = daemon.rows("SELECT facts FROM job WHERE id = ?", job_id)
    directory = daemon.state_dir / "prompts" / json.loads(job["facts"])["prompts"]["sha256"]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    with closing(Snapshot.open(directory)) as snapshot:
        rows = [snapshot.row(number) for number in range(snapshot.rows)]
    return [tokenizer.decode(list(row.tokens), skip_special_tokens=False) for row in rows]


def tensors(checkpoints: Path) -> set[str]:
    """Names of the weights in the newest checkpoint."""
    names: set[str] = set()
    newest = max(checkpoints.iterdir(), key=lambda path: int(path.name))
    for file in newest.glob("*weights*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        names |= set(json.loads(data[8 : 8 + length])) - {"__metadata__"}
    return names


def column(samples: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """A per-token list over all samples."""
    return [value for sample in samples for value in sample[name]]


# --- what is trained -----------------------------------------------------------------------------------------------


def test_lora_trains_the_adapter_alone(ran: dict[str, Ran]):
    assert ran["adapter"].trained
    assert all(".lora_" in name for name in ran["adapter"].trained)


def test_a_full_fine_tune_trains_every_weight(ran: dict[str, Ran]):
    assert "model.embed_tokens.weight" in ran["interpolated"].trained
    assert not any(".lora_" in name for name in ran["interpolated"].trained)


def test_gradient_checkpointing_reaches_the_learner(ran: dict[str, Ran]):
    used = {name: json.loads(job.recorded[0]["numerics"])["gradient_checkpointing"] for name, job in ran.items()}
    assert used == {"adapter": "true", "interpolated": "false", "alternating": "false", "sharing": "false"}


# --- prompts and rewards -------------------------------------------------------------------------------------------


def test_chat_messages_from_parquet_are_rendered_with_the_system_prompt(ran: dict[str, Ran]):
    system, user = "<|im_start|>system\nBe brief.<|im_end|>", "<|im_start|>user\nsing {}<|im_end|>"
    assert ran["adapter"].rendered == [f"{system}\n{user.format(n)}\n<|im_start|>assistant\n" for n in range(6)]


def test_a_plain_prompt_is_wrapped_as_a_chat_unless_the_job_says_no(ran: dict[str, Ran]):
    user = "<|im_start|>user\nsay {}<|im_end|>\n<|im_start|>assistant\n"
    assert ran["interpolated"].rendered == [user.format(n) for n in range(8)]
    assert ran["alternating"].rendered == [f"say {n}" for n in range(8)]


def test_prompts_come_in_the_file_s_order_without_shuffle_and_in_another_with_it(ran: dict[str, Ran]):
    def in_order(job: Ran) -> list[bool]:
        return [json.loads(s["prompt"]) == f"say {s['ordinal'] % 8}" for s in job.samples]

    assert all(in_order(ran["interpolated"]))
    assert not all(in_order(ran["sharing"]))


def test_two_rewards_add_up_by_their_weights(ran: dict[str, Ran]):
    for step in ran["adapter"].steps:
        expected = sum(weight * step[f"reward_mean.{name}"] for name, weight in WEIGHTS.items())
        assert step["reward_mean"] == pytest.approx(expected)
        assert step["reward_std.vowels"] > 0
    for sample in ran["adapter"].samples:
        assert sample["reward"] == pytest.approx(sum(WEIGHTS[n] * v for n, v in sample["reward_parts"].items()))


def test_stop_tokens_end_completions(ran: dict[str, Ran]):
    samples = [sample for job in ran.values() for sample in job.samples]
    assert {sample["finish"] for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert (sample["tokens"][-1] in STOPS) == (sample["finish"] == "stop")
        assert not set(sample["tokens"][:-1]) & set(STOPS)


# --- losses --------------------------------------------------------------------------------------------------------


def over_tokens(uses: Sequence[Mapping[str, Any]]) -> float:
    """dapo's loss where policy and behaviour agree."""
    return -sum(u["advantage"] * u["n_tokens"] for u in uses) / sum(u["n_tokens"] for u in uses)


def over_sequences(uses: Sequence[Mapping[str, Any]]) -> float:
    """grpo's loss where policy and behaviour agree."""
    return -sum(u["advantage"] for u in uses) / len(uses)


def test_dapo_averages_over_tokens(ran: dict[str, Ran]):
    job = ran["interpolated"]
    expected = over_tokens(job.first_minibatch())
    assert abs(expected) > 0.01
    assert job.losses() == [pytest.approx(expected, abs=1e-3)]


def test_grpo_averages_over_sequences(ran: dict[str, Ran]):
    job = ran["adapter"]
    assert abs(over_tokens(job.first_minibatch())) > 0.01
    assert job.losses()[0] == pytest.approx(over_sequences(job.first_minibatch()), abs=1e-3)


def test_each_minibatch_is_an_optimiser_step_in_each_iteration(ran: dict[str, Ran]):
    assert len(ran["adapter"].losses()) == 2 * 2
    assert {use["minibatch"] for use in ran["adapter"].uses} == {0, 1}
    assert len(ran["interpolated"].losses()) == 1


# --- the proximal policy -------------------------------------------------------------------------------------------


def test_loglinear_interpolates_by_staleness(ran: dict[str, Ran]):
    samples = ran["interpolated"].samples
    staleness, alpha = column(samples, "staleness"), column(samples, "alpha")
    assert max(staleness) >= 1
    assert alpha == [0.0 if d == 0 else pytest.approx(1 / d) for d in staleness]
    behave, policy = column(samples, "behaviour_logps"), column(samples, "policy_logps")
    expected = [a * b + (1 - a) * p for a, b, p in zip(alpha, behave, policy, strict=True)]
    assert column(samples, "proximal_logps") == pytest.approx(expected, abs=1e-4)


def test_recompute_takes_the_policy_at_the_start_of_the_step(ran: dict[str, Ran]):
    assert [step["alpha_mean"] for step in ran["adapter"].steps] == [0, 0]
    assert min(step["time"]["prox_logp"] for step in ran["adapter"].steps) > 0
    fresh = zip(*(column(ran["adapter"].samples, n) for n in ("proximal_logps", "behaviour_logps")), strict=True)
    assert max(abs(prox - behave) for prox, behave in fresh) < 1e-3


def test_none_leaves_the_behaviour_policy_in_its_place(ran: dict[str, Ran]):
    job = ran["alternating"]
    assert column(job.samples, "proximal_logps") == column(job.samples, "behaviour_logps")
    assert {(step["weight_min"], step["weight_max"], step["alpha_mean"]) for step in job.steps} == {(1, 1, 1)}


# --- overlap -------------------------------------------------------------------------------------------------------


def test_generation_runs_ahead_of_learning_by_default(ran: dict[str, Ran]):
    assert max(step["staleness_max"] for step in ran["interpolated"].steps) >= 1
    assert {step["overcommit"] for step in ran["interpolated"].steps} == {2}


def test_without_staleness_every_token_is_fresh(ran: dict[str, Ran]):
    assert [(step["staleness_max"], step["overcommit"]) for step in ran["adapter"].steps] == [(0, 0)] * 2


@pytest.mark.parametrize("name", ["alternating", "sharing"])
def test_in_turns_nothing_is_generated_while_the_learner_works(ran: dict[str, Ran], name: str):
    """It might run ahead by a version and has nothing to carry over: yet every token is of the step's own version."""
    assert {step["staleness_max"] for step in ran[name].steps} == {0}


def test_a_shared_device_is_leased_once(ran: dict[str, Ran]):
    leased = {name: len(job.devices) for name, job in ran.items()}
    assert leased == {"adapter": 2, "interpolated": 2, "alternating": 2, "sharing": 1}


# --- the recipes ---------------------------------------------------------------------------------------------------


def test_every_recipe_is_a_valid_job():
    recipes = sorted((REPOSITORY / "jobs").glob("*.toml"))
    assert [load_job(path)[0].job.name for path in recipes] == ["gsm8k-a3po", "quickstart", "reasoning-gym"]


@pytest.mark.parametrize("name", ["quickstart", "reasoning-gym"])
def test_a_recipe_that_needs_no_hub_passes_check(tmp_path: Path, name: str):
    done = Daemon(tmp_path / "state").cli("check", REPOSITORY / "jobs" / f"{name}.toml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["left_to_submit"] == []
