"""What the generator loads: all of the model and its head, rounded, and a reference that is right about it."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhfd.core import wire
from rlhfd.errors import DiskFullError, JobFileError
from rlhfd.workers import publication
from rlhfd.workers.optimizer import checksum
from tests.workers.steps import TEMPERATURE, group_frames, ints, learn, make_rollouts, read_floats, session_of

CANARY = [[5, 9, 300, 17, 44], [201, 3, 77]]
LORA = {"use_peft": True, "lora_r": 4}


def publish(session, directory, *, noise_seed=None, canary=CANARY):
    return session.publish(
        wire.Publish(dir=str(directory), noise_seed=noise_seed, canary=[ints(tokens) for tokens in canary])
    )


def transformers_logps(directory, tokens, temperature=1.0):
    """Of tokens[1:], in float32, as any reader of the directory computes them."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


@pytest.fixture(params=["tied", "untied"])
def model(request, make_tiny_model):
    return make_tiny_model() if request.param == "tied" else make_tiny_model("--untied")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_publication_is_the_whole_model_in_the_serving_dtype_with_an_explicit_head(model, tmp_path, dtype):
    session = session_of(model, dtype=dtype)
    published = publish(session, tmp_path / "v1")
    with safe_open(tmp_path / "v1" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    original = set(load_file(model / "model.safetensors"))
    config = json.loads((tmp_path / "v1" / "config.json").read_text())
    tensors = load_file(tmp_path / "v1" / "model.safetensors")
    assert names == original | {"lm_head.weight"}
    assert {str(t.dtype) for t in tensors.values()} == {f"torch.{dtype}"}
    assert config["dtype"] == dtype
    assert config["tie_word_embeddings"] == json.loads((model / "config.json").read_text())["tie_word_embeddings"]
    assert published.nbytes == sum(f.stat().st_size for f in (tmp_path / "v1").iterdir())
    assert [f.name for f in tmp_path.iterdir()] == ["v1"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_the_canary_is_what_a_reader_of_the_directory_computes(model, tmp_path, dtype, settings):
    session = session_of(model, dtype=dtype, **settings)
    learn(session, make_rollouts(session.policy, version=0), learning_rates=[1e-2])
    published = publish(session, tmp_path / "v1")
    for tokens, logps in zip(CANARY, published.canary, strict=True):
        assert read_floats(logps) == pytest.approx(transformers_logps(tmp_path / "v1", tokens), abs=1e-5)


def test_the_reference_is_of_the_rounded_tensors_and_not_of_the_masters(tiny_model, tmp_path):
    wide, narrow = session_of(tiny_model), session_of(tiny_model, dtype="bfloat16")
    exact, rounded = (publish(s, tmp_path / name).canary for s, name in ((wide, "a"), (narrow, "b")))
    gaps = [
        abs(a - b)
        for x, y in zip(exact, rounded, strict=True)
        for a, b in zip(read_floats(x), read_floats(y), strict=True)
    ]
    assert max(gaps) > 1e-4


def test_an_adapter_is_published_merged_and_changes_the_canary(tiny_model, tmp_path):
    session = session_of(tiny_model, **LORA)
    before = publish(session, tmp_path / "v0").canary
    learn(session, make_rollouts(session.policy, version=0), learning_rates=[1e-2])
    after = publish(session, tmp_path / "v1").canary
    assert before != after
    assert not any("lora" in name for name in load_file(tmp_path / "v1" / "model.safetensors"))
    assert session.policy.causal.get_decoder().layers[0].self_attn.q_proj.disable_adapters is False


def test_a_probe_moves_every_tensor_and_no_master(model, tmp_path):
    session = session_of(model, dtype="bfloat16")
    masters = checksum(session.policy.trainable())
    plain, probe = publish(session, tmp_path / "plain"), publish(session, tmp_path / "probe", noise_seed=7)
    still, moved = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "probe"))
    assert all(not torch.equal(still[name], moved[name]) for name in still)
    spread = still["model.layers.0.mlp.up_proj.weight"].float()
    shift = moved["model.layers.0.mlp.up_proj.weight"].float() - spread
    assert shift.std().item() == pytest.approx(0.05 * spread.std().item(), rel=0.1)
    assert checksum(session.policy.trainable()) == masters
    assert plain.canary != probe.canary


def test_a_probe_of_a_tied_model_keeps_head_and_embedding_equal(tiny_model, tmp_path):
    publish(session_of(tiny_model), tmp_path / "probe", noise_seed=7)
    tensors = load_file(tmp_path / "probe" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_the_noise_is_a_function_of_the_seed(tiny_model, tmp_path):
    session = session_of(tiny_model)
    one, same, other = (publish(session, tmp_path / str(i), noise_seed=seed) for i, seed in enumerate((7, 7, 8)))
    assert one.canary == same.canary != other.canary


def test_changed_counts_elements_against_the_last_real_publication(tiny_model, tmp_path):
    session = session_of(tiny_model, dtype="bfloat16")
    assert publish(session, tmp_path / "first").changed == 1.0
    publish(session, tmp_path / "probe", noise_seed=1)
    assert publish(session, tmp_path / "again").changed == 0.0
    learn(session, make_rollouts(session.policy, version=0), learning_rates=[1e-5])
    swallowed = publish(session, tmp_path / "small").changed
    learn(session, make_rollouts(session.policy, version=1), learning_rates=[1e-2])
    assert 0 < swallowed < 0.5 < publish(session, tmp_path / "large").changed


def test_a_publication_replaces_one_of_the_same_name_and_a_failed_one_leaves_nothing(tiny_model, tmp_path, monkeypatch):
    session = session_of(tiny_model)
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "old").write_text("of a life before")
    publish(session, tmp_path / "v1")
    assert {f.name for f in (tmp_path / "v1").iterdir()} == {"config.json", "model.safetensors"}

    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publication, "save_file", full)
    with pytest.raises(DiskFullError, match="v2"):
        publish(session, tmp_path / "v2")
    assert [f.name for f in tmp_path.iterdir()] == ["v1"]


def test_stored_tokens_are_scored_under_the_published_tensors(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(publication, "TOKENS_PER_FORWARD", 30)
    session = session_of(tiny_model, dtype="bfloat16")
    rollouts = make_rollouts(session.policy, version=0)
    publish(session, tmp_path / "v1")
    reply = session.logprobs(wire.LogProbs(groups=3, temperature=TEMPERATURE), group_frames(rollouts))
    for r in rollouts:
        expected = transformers_logps(tmp_path / "v1", r.prompt + r.tokens, TEMPERATURE)[len(r.prompt) - 1 :]
        assert read_floats(reply.logps[r.id]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("settings", [{}, LORA], ids=["full", "lora"])
def test_an_export_is_a_plain_directory_of_the_trained_model(model, tmp_path, settings):
    session = session_of(model, **settings)
    learn(session, make_rollouts(session.policy, version=0), learning_rates=[1e-2])
    session.export(wire.Export(dir=str(tmp_path / "out")))
    canary = publish(session, tmp_path / "v1").canary
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(load_file(model / "model.safetensors"))
    assert {f.name for f in model.iterdir()} == {f.name for f in (tmp_path / "out").iterdir()}
    assert read_floats(canary[0]) == pytest.approx(transformers_logps(tmp_path / "out", CANARY[0]), abs=1e-5)


def test_an_export_keeps_the_start_model_s_dtype(make_tiny_model, tmp_path):
    session = session_of(make_tiny_model("--dtype", "bfloat16"))
    session.export(wire.Export(dir=str(tmp_path / "out")))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_export_never_replaces_what_is_there(tiny_model, tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(JobFileError, match="not empty"):
        session_of(tiny_model).export(wire.Export(dir=str(tmp_path)))
    assert (tmp_path / "precious").read_text() == "mine"
