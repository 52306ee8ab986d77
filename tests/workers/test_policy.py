"""The policy in memory: dtypes, adapter, checkpointing of activations, and models that are refused."""

import json
import shutil

import pytest
import torch

from rlhfd.errors import JobFileError
from rlhfd.workers import numerics
from rlhfd.workers.batch import collate
from rlhfd.workers.session import Session
from tests.workers.steps import as_read, learn, load_frame, make_rollouts, own_logps, parameters, session_of, silent

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}


def altered(model, directory, **config):
    """A copy of the model with other configuration values."""
    shutil.copytree(model, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def scored_in_bfloat16(model, monkeypatch, *, native):
    """A job in bfloat16 beside one in float32: mean difference of log-probs, and the session."""
    monkeypatch.setattr(numerics, "multiplies_bfloat16", lambda _: native)
    wide, narrow = session_of(model), session_of(model, dtype="bfloat16")
    batch = collate(as_read(make_rollouts(wide.policy, version=0)), wide.policy.device)
    exact, rough = (session.policy.scores(batch.inputs, 1.0).logps for session in (wide, narrow))
    assert rough.dtype == torch.float32
    return (exact - rough).abs().mean().item(), narrow


def test_a_job_in_bfloat16_computes_the_body_in_it_over_float32_masters(tiny_model, monkeypatch):
    difference, session = scored_in_bfloat16(tiny_model, monkeypatch, native=True)
    assert 1e-4 < difference < 0.1
    assert {p.dtype for p in session.policy.trainable().values()} == {torch.float32}
    assert session.loaded().numerics["compute"] == "bfloat16"


def test_where_bfloat16_would_be_emulated_the_body_computes_in_float32(tiny_model, monkeypatch):
    difference, session = scored_in_bfloat16(tiny_model, monkeypatch, native=False)
    assert difference == 0
    assert session.loaded().numerics["compute"] == "float32"
    assert session.policy.dtype == torch.bfloat16  # and serves bfloat16 all the same


def test_gradient_checkpointing_gives_the_same_step(tiny_model):
    plain, checkpointed = session_of(tiny_model), session_of(tiny_model, gradient_checkpointing=True)
    rollouts = make_rollouts(plain.policy, version=0)
    assert learn(plain, rollouts).fingerprint == learn(checkpointed, rollouts).fingerprint
    assert checkpointed.loaded().numerics["gradient_checkpointing"] == "true"


def test_padding_does_not_reach_the_tokens_beside_it(tiny_model):
    policy = session_of(tiny_model).policy
    rollouts = make_rollouts(policy, version=0)
    together = policy.scores(collate(as_read(rollouts), policy.device).inputs, 1.0).logps
    alone = torch.cat([policy.scores(collate([r], policy.device).inputs, 1.0).logps for r in as_read(rollouts)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_an_adapter_is_trained_alone_and_starts_as_the_base_model(tiny_model):
    plain, adapted = session_of(tiny_model), session_of(tiny_model, **LORA)
    rollouts = make_rollouts(plain.policy, version=0)
    assert own_logps(adapted.policy, rollouts) == own_logps(plain.policy, rollouts)
    base = {n: t.clone() for n, t in adapted.policy.causal.state_dict().items() if ".lora_" not in n}
    learn(adapted, rollouts, learning_rates=[1e-2])
    after = adapted.policy.causal.state_dict()
    assert all(".lora_" in name for name in adapted.policy.trainable())
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.items())
    loaded = adapted.loaded()
    assert 0 < loaded.trainable < loaded.parameters


def test_the_same_seed_draws_the_same_adapter_and_another_seed_another(tiny_model):
    drawn = [parameters(session_of(tiny_model, **LORA, seed=seed)) for seed in (1, 1, 2)]
    name = next(name for name in drawn[0] if "lora_A" in name)
    assert torch.equal(drawn[0][name], drawn[1][name])
    assert not torch.equal(drawn[0][name], drawn[2][name])


def test_dropout_in_the_adapter_is_refused(tiny_model):
    with pytest.raises(JobFileError, match="lora_dropout"):
        session_of(tiny_model, **LORA, lora_dropout=0.1)


def test_target_modules_that_the_model_lacks_are_refused(tiny_model):
    with pytest.raises(JobFileError, match="adapter"):
        session_of(tiny_model, **LORA, lora_target_modules=["no_such_layer"])


def test_attention_dropout_of_the_model_is_switched_off(tiny_model, tmp_path):
    lossy = session_of(altered(tiny_model, tmp_path / "model", attention_dropout=0.5))
    rollouts = make_rollouts(lossy.policy, version=0)
    assert learn(lossy, rollouts).fingerprint == learn(session_of(tiny_model), rollouts).fingerprint


def test_a_directory_without_a_model_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(JobFileError, match="can't be loaded"):
        session_of(tmp_path)


def test_pickled_weights_are_not_even_looked_at(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(JobFileError, match="can't be loaded"):
        session_of(tmp_path / "model")


def test_logits_that_are_changed_after_the_head_are_refused(tiny_model, tmp_path, monkeypatch):
    from transformers import LlamaForCausalLM

    right = LlamaForCausalLM.forward

    def capped(self, *args, **options):
        output = right(self, *args, **options)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", capped)
    with pytest.raises(JobFileError, match="after the head"):
        session_of(tiny_model)


def test_the_numerics_key_names_what_decides_the_bits(tiny_model):
    key = Session(load_frame(tiny_model), silent).loaded().numerics
    assert key["device"] == "cpu"
    assert key["threads"] == "1"
    assert {"torch", "transformers", "dtype", "attention", "optimizer", "gradient_checkpointing"} <= key.keys()
    assert {"cpu_capability", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"} <= key.keys()
