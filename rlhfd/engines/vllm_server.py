"""Start a stock vLLM server as a generator: command line, environment, readiness.

rlhfd's own flags (`core/engine_args.py` refuses them in a job) keep the promises that the pipeline relies on:
log-probs after temperature, tokens in and out, events of `STREAM_INTERVAL` tokens, sampling defaults of nobody else.
"""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from rlhfd.core.engine_args import check_engine_args
from rlhfd.core.types import Epoch, JobId
from rlhfd.engines.process import Child, ChildSpec, describe_exit, spawn
from rlhfd.engines.vllm import EngineDeadlines, VllmClient
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, EngineStartError

VLLM = "vllm.entrypoints.openai.api_server"
SERVED_NAME = "policy"
STREAM_INTERVAL = 16
SOCKET_PATH_LIMIT = 107  # bytes: the kernel's sun_path
READY_POLL = 0.1
WARM_UP = (1, 2, 3)
KV_BLOCK = 128  # tokens: the CPU build's block size
KV_CACHE_LIMITS = (64 * 1024 * 1024, 4 * 1024 * 1024 * 1024)  # bytes
KV_CACHE_UNKNOWN = 512 * 1024 * 1024  # bytes, where config.json does not say enough
SHORTEST_BATCH = 2048


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """One generator. Lengths in tokens. `kv_cache_bytes`: None is enough on CPU, and vLLM's own choice on a GPU.

    `module` is what `python -m` runs: the stock server, or the one of rlhfd.testing.
    """

    job_id: JobId
    attempt: int
    epoch: Epoch
    model_dir: Path
    socket: Path
    log_path: Path
    dtype: str
    max_model_len: int
    max_num_seqs: int
    cores: tuple[int, ...] | None = None
    gpus: tuple[str, ...] = ()
    kv_cache_bytes: int | None = None
    engine_args: Mapping[str, object] = field(default_factory=dict[str, object])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    module: str = VLLM


def _own_args(spec: ServerSpec) -> dict[str, object]:
    args: dict[str, object] = {
        "model": str(spec.model_dir),
        "served_model_name": SERVED_NAME,
        "uds": str(spec.socket),
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "stream_interval": STREAM_INTERVAL,
        "generation_config": "vllm",
    }
    if spec.gpus:
        return args | {"tensor_parallel_size": len(spec.gpus)}
    return args | {"enable_chunked_prefill": False}


def _default_args(spec: ServerSpec) -> dict[str, object]:
    """What a job may change."""
    args: dict[str, object] = {"max_num_seqs": spec.max_num_seqs, "disable_uvicorn_access_log": True}
    if spec.kv_cache_bytes is not None or not spec.gpus:
        args["kv_cache_memory_bytes"] = spec.kv_cache_bytes or cpu_kv_cache_bytes(spec)
    if spec.gpus:
        return args
    return args | {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",  # the worker inside the engine's process: less memory, faster start
        "max_num_batched_tokens": max(SHORTEST_BATCH, spec.max_model_len),
    }


class _ModelConfig(msgspec.Struct):
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    head_dim: int | None = None


def cpu_kv_cache_bytes(spec: ServerSpec) -> int:
    """Keys and values of `max_num_seqs` sequences of full length, within limits."""
    try:
        config = msgspec.json.decode((spec.model_dir / "config.json").read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.DecodeError):
        return KV_CACHE_UNKNOWN  # the server will say what is wrong with its model
    width = config.head_dim or config.hidden_size // max(1, config.num_attention_heads)
    heads = config.num_key_value_heads or config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * (4 if spec.dtype == "float32" else 2)
    if per_token == 0:
        return KV_CACHE_UNKNOWN
    per_sequence = -(-spec.max_model_len // KV_BLOCK) * KV_BLOCK * per_token
    least, most = KV_CACHE_LIMITS
    return max(per_sequence, least, min(spec.max_num_seqs * per_sequence, most))


def command(spec: ServerSpec) -> tuple[str, ...]:
    """The server's command line. Raises JobFileError for an engine argument that rlhfd keeps for itself."""
    check_engine_args(spec.engine_args)
    args = _default_args(spec) | dict(spec.engine_args) | _own_args(spec)
    return (sys.executable, "-m", spec.module, *(flag for key, value in args.items() for flag in _flag(key, value)))


def _flag(key: str, value: object) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *(str(item) for item in value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [f"--{name}", msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)]


def environment(spec: ServerSpec) -> dict[str, str]:
    """What the server needs beyond a child's own environment."""
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if not spec.gpus:
        # The first log-prob would otherwise wait for a C++ compiler: 21 s for a sum that runs as fast without it.
        env["TORCHDYNAMO_DISABLE"] = "1"
        if spec.cores is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, spec.cores))
    return env | dict(spec.env)


class VllmServer:
    """A running generator: its process and its client."""

    def __init__(self, *, child: Child, client: VllmClient) -> None:
        self.child = child
        self.client = client

    @classmethod
    async def start(cls, spec: ServerSpec, deadlines: EngineDeadlines | None = None) -> Self:
        """Start it and wait until it has answered a first request; that compiles and allocates what is lazy.

        Raises EngineStartError with the last log lines where it ended or was not ready within the deadline;
        JobFileError for an engine argument that rlhfd keeps for itself.
        """
        server = await cls.launch(spec, deadlines or EngineDeadlines())
        try:
            await server.ready()
        except BaseException:
            await server.kill()
            raise
        return server

    @classmethod
    async def launch(cls, spec: ServerSpec, deadlines: EngineDeadlines) -> Self:
        """Start the process without waiting for it."""
        if len(str(spec.socket).encode()) > SOCKET_PATH_LIMIT:
            raise EngineStartError(f"the socket path {spec.socket} is longer than {SOCKET_PATH_LIMIT} bytes; move it")
        spec.socket.unlink(missing_ok=True)
        child = await spawn(
            ChildSpec(
                role="generator",
                job_id=spec.job_id,
                attempt=spec.attempt,
                epoch=spec.epoch,
                argv=command(spec),
                env=environment(spec),
                cores=spec.cores,
                gpus=spec.gpus,
                log_path=spec.log_path,
            )
        )
        return cls(child=child, client=VllmClient(spec.socket, log_path=spec.log_path, deadlines=deadlines))

    async def stop(self) -> int:
        """End it with SIGTERM, then force. Returns its status."""
        await self.client.close()
        return await self.child.terminate(self.client.deadlines.stop)

    async def kill(self) -> int:
        """End it by force. Returns its status."""
        await self.client.close()
        return await self.child.kill()

    async def ready(self) -> None:
        """Wait until it has answered a first request. Raises EngineStartError as `start` does."""
        seconds = self.client.deadlines.start
        ended = asyncio.create_task(self.child.wait())
        answers = asyncio.create_task(self._answers())
        try:
            await asyncio.wait({ended, answers}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                how = describe_exit(ended.result())
                raise EngineStartError(f"the generator ended ({how}) before it was ready; {self._log_end()}")
            if not answers.done():
                raise EngineStartError(f"the generator was not ready within {seconds:g} s; {self._log_end()}")
            await self._first_answer(answers)
        finally:
            ended.cancel()
            answers.cancel()

    async def _first_answer(self, answers: "asyncio.Task[None]") -> None:
        try:
            await answers
        except (EngineError, DeadlineError) as error:
            raise EngineStartError(f"the generator failed its first request: {error}; {self._log_end()}") from error

    async def _answers(self) -> None:
        """Until it is healthy, then one request; whether the process has ended meanwhile is `ready`'s to see."""
        while True:
            with suppress(EngineDiedError):  # no socket yet, or no process any more
                await self.client.health()
                async for _ in self.client.generate(
                    request_id="warm-up", token_ids=WARM_UP, max_tokens=2, temperature=1.0, seed=0
                ):
                    pass
                return
            await asyncio.sleep(READY_POLL)

    def _log_end(self) -> str:
        return f"its log {self.child.spec.log_path} ends:\n{self.child.tail()}"
