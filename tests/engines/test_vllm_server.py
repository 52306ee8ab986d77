"""Starting, losing and ending a generator, on the fake engine; the command line that the real one gets."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from rlhfd.core.engine_args import REFUSED, SET_BY_RLHFD, check_engine_args
from rlhfd.engines.process import describe_exit
from rlhfd.engines.vllm import EngineDeadlines, VllmClient
from rlhfd.engines.vllm_server import ServerSpec, VllmServer, command, environment
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, EngineStartError, JobFileError
from tests.conftest import tiny_server_spec
from tests.engines.publications import publish

PROMPT = [1, 442, 268, 202, 38, 319, 341, 224, 283, 72]


@pytest.fixture
def spec(tmp_path, tiny_model):
    return tiny_server_spec(tmp_path, tiny_model, module="rlhfd.testing.engine")


@pytest.fixture
async def start():
    servers = []

    async def start(spec: ServerSpec, *faults: str, **deadlines: float) -> VllmServer:
        spec = replace(spec, engine_args={"fault": list(faults)}) if faults else spec
        server = await VllmServer.start(spec, EngineDeadlines(**deadlines))
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.kill()


async def tokens(client: VllmClient, n: int = 60) -> list[int]:
    events = client.generate(request_id="r", token_ids=PROMPT, max_tokens=n, temperature=1.0, seed=7)
    return [t async for e in events for t in e.tokens]


async def fault(client: VllmClient, name: str, value: int = 0) -> None:
    connector = aiohttp.UnixConnector(path=str(client.socket))
    body = {"name": name, "value": value}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://engine/fault", json=body) as answer,
    ):
        assert answer.status == 200


async def test_a_server_that_is_ready_has_answered_a_request(spec, start):
    server = await start(spec)
    assert len(await tokens(server.client)) == 60
    assert await server.stop() == 0


async def test_an_engine_that_dies_at_its_start_shows_its_last_words(spec, start):
    with pytest.raises(EngineStartError, match=r"ended \(exit status 1\) before it was ready; its log .* ends:\n") as e:
        await start(spec, "die_at_start")
    assert "made to die at its start" in str(e.value)


async def test_a_model_directory_that_does_not_exist_shows_in_the_start_error(spec, start):
    with pytest.raises(EngineStartError, match=r"No such file or directory: 'nowhere/config\.json'"):
        await start(replace(spec, model_dir=Path("nowhere")))


async def test_an_engine_that_is_never_ready_is_given_up_and_gone(spec):
    server = await VllmServer.launch(replace(spec, engine_args={"fault": "hang_after"}), EngineDeadlines(start=3.0))
    with pytest.raises(EngineStartError, match="was not ready within 3 s"):
        await server.ready()
    assert describe_exit(await server.kill()) == "SIGKILL"


async def test_a_first_request_that_fails_is_a_start_error(spec, start):
    with pytest.raises(EngineStartError, match=r"failed its first request: .* the engine was made to fail"):
        await start(spec, "error_after")


async def test_an_engine_killed_in_mid_stream_is_dead_and_its_tokens_are_kept(spec, start):
    server = await start(spec)
    whole = await tokens(server.client)
    await fault(server.client, "die_after", 40)
    seen = []

    async def read() -> None:
        events = server.client.generate(request_id="r", token_ids=PROMPT, max_tokens=60, temperature=1.0, seed=7)
        async for event in events:
            seen.extend(event.tokens)

    with pytest.raises(EngineDiedError):
        await read()
    assert seen == whole[:33]  # the events of 1, 16 and 16 tokens
    assert describe_exit(await server.child.wait()) == "SIGKILL"


async def test_an_engine_starts_again_after_a_crash_on_the_same_socket(spec, start):
    first = await start(spec)
    before = await first.client.canary([PROMPT])
    await first.kill()
    second = await start(spec)
    assert await second.client.canary([PROMPT]) == before


async def test_an_engine_that_hangs_runs_into_the_gap_deadline(spec, start):
    server = await start(spec, event_gap=0.5)
    await fault(server.client, "hang_after", 30)
    with pytest.raises(DeadlineError, match="next event"):
        await tokens(server.client)


async def test_an_engine_that_is_deaf_to_sigterm_is_killed(spec, start):
    server = await start(spec, "deaf", stop=0.2)
    assert describe_exit(await server.stop()) == "SIGKILL"


async def test_an_error_in_one_stream_leaves_the_others(spec, start):
    server = await start(spec)
    await fault(server.client, "error_after", 50)
    results = await asyncio.gather(*(tokens(server.client) for _ in range(4)), return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["EngineError", "list", "list", "list"]


@pytest.mark.parametrize("name", ["ignore_reload", "stale_head"])
async def test_an_engine_may_be_made_to_serve_other_weights_than_published(spec, start, tiny_model, tmp_path, name):
    server = await start(spec)
    moved = publish(tiny_model, tmp_path / "moved", noise=0.05)
    before = await server.client.canary([PROMPT])
    await fault(server.client, name)
    mark = server.client.log_mark()
    await server.client.reload(moved)
    faulty = await server.client.canary([PROMPT])
    assert server.client.failed_weight_lines(mark) == []
    assert (faulty == before) == (name == "ignore_reload")
    honest = await start(replace(spec, model_dir=moved, socket=tmp_path / "honest.sock", log_path=tmp_path / "honest"))
    assert await honest.client.canary([PROMPT]) != faulty


async def test_nothing_is_sampled_after_a_reload_that_failed(spec, start, tiny_model, tmp_path):
    server = await start(spec)
    await fault(server.client, "reload_fails")
    with pytest.raises(EngineError, match="refused /collective_rpc with 500"):
        await server.client.reload(publish(tiny_model, tmp_path / "moved"))
    with pytest.raises(EngineDiedError):
        await tokens(server.client)
    assert await server.child.wait() == 1


async def test_the_pace_of_the_fake_is_set_by_its_flag(spec, start):
    server = await start(replace(spec, engine_args={"tokens_per_second": 100.0}))
    loop = asyncio.get_running_loop()
    began = loop.time()
    await tokens(server.client, 20)
    assert loop.time() - began > 0.18


async def test_a_socket_path_that_the_kernel_cannot_hold_is_refused(spec, tmp_path):
    with pytest.raises(EngineStartError, match="longer than 107 bytes"):
        await VllmServer.start(replace(spec, socket=tmp_path / ("x" * 100)))


def flags(spec: ServerSpec) -> dict[str, str]:
    """Flag -> value, "" where it has none."""
    words = command(spec)[3:]
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if after.startswith("--") else after for word, after in pairs if word.startswith("--")}


def test_a_cpu_server_is_pinned_and_never_splits_a_prefill(spec):
    line, env = flags(replace(spec, cores=(0, 1))), environment(replace(spec, cores=(0, 1)))
    assert "--no-enable-chunked-prefill" in line
    assert line["--max-num-batched-tokens"] == "2048"
    assert line["--kv-cache-memory-bytes"] == str(64 * 1024 * 1024)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "--tensor-parallel-size" not in line


@pytest.mark.parametrize(
    ("config", "sequences", "length", "megabytes"),
    [
        (
            {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
            32,
            1000,
            720,
        ),
        ({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}, 4, 100, 64),
        ({"num_hidden_layers": 80, "num_attention_heads": 64, "head_dim": 128}, 256, 4096, 10240),
        ({"num_hidden_layers": 30, "num_attention_heads": 32, "head_dim": 128}, 256, 4096, 4096),
        ({"model_type": "mamba"}, 4, 100, 512),
    ],
)
def test_the_kv_cache_on_cpu_has_room_for_every_sequence_within_limits(
    spec, tmp_path, config, sequences, length, megabytes
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = replace(spec, model_dir=tmp_path, max_num_seqs=sequences, max_model_len=length, kv_cache_bytes=None)
    assert flags(replace(spec, dtype="bfloat16"))["--kv-cache-memory-bytes"] == str(megabytes * 1024 * 1024)


def test_a_batch_on_cpu_holds_the_longest_sequence(spec):
    assert flags(replace(spec, max_model_len=4096))["--max-num-batched-tokens"] == "4096"


def test_a_gpu_server_spreads_over_its_lease_and_keeps_vllms_own_choices(spec):
    spec = replace(spec, gpus=("GPU-a", "GPU-b"), cores=None, kv_cache_bytes=None)
    line, env = flags(spec), environment(spec)
    assert line["--tensor-parallel-size"] == "2"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--no-enable-chunked-prefill"} & set(line)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in env
    assert "TORCHDYNAMO_DISABLE" not in env


def test_a_job_may_change_what_is_not_rlhfds(spec):
    args = {"max_num_seqs": 8, "enforce_eager": False, "hf_overrides": {"head_dtype": "float32"}, "block_size": 64}
    line = flags(replace(spec, engine_args=args))
    assert line["--max-num-seqs"] == "8"
    assert "--no-enforce-eager" in line
    assert "--enforce-eager" not in line
    assert line["--hf-overrides"] == '{"head_dtype":"float32"}'
    assert line["--block-size"] == "64"


@pytest.mark.parametrize("key", ["model", "logprobs-mode", "logprobs_mode", "no_enable_scale_out", "api_key", "uds"])
def test_an_argument_that_rlhfd_sets_is_refused_by_name(spec, key):
    with pytest.raises(JobFileError, match=f"generator.engine_args.{key} is set by rlhfd itself"):
        command(replace(spec, engine_args={key: 1}))


def test_an_argument_with_dashes_is_refused_with_its_right_spelling():
    with pytest.raises(JobFileError, match='must be spelled "max_num_seqs"'):
        check_engine_args({"--max-num-seqs": 8})


def test_every_flag_that_a_job_cannot_change_is_refused(spec):
    """What the server gets whatever the job says is in the table, and nothing in the table is a mere default."""
    gpu, cpu = replace(spec, gpus=("GPU-a",), cores=None), spec
    always = {name for s in (gpu, cpu) for name in flags(s)} - {
        "--max-num-seqs", "--disable-uvicorn-access-log", "--kv-cache-memory-bytes", "--enforce-eager",
        "--distributed-executor-backend", "--max-num-batched-tokens",
    }  # fmt: skip
    named = {name.removeprefix("--").removeprefix("no-").replace("-", "_") for name in always}
    assert named == SET_BY_RLHFD - {"host", "port", "runner"}
    assert SET_BY_RLHFD < REFUSED
