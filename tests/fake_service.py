"""A daemon in memory, for the tests of the API and of the CLI: jobs that go only where the test moves them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rlhfd.api import SubmitBody
from rlhfd.api.service import Object, Verb
from rlhfd.core.types import JobId
from rlhfd.errors import StorageError, UnknownJobError, UsageError

MOVES = {
    ("running", "pause"): "paused",
    ("queued", "pause"): "paused",
    ("paused", "resume"): "queued",
    ("queued", "cancel"): "cancelled",
    ("running", "cancel"): "cancelled",
    ("paused", "cancel"): "cancelled",
    ("failed", "retry"): "queued",
}
TIME = {"total": 2.0, "wait_rollouts": 0.5, "wait_scores": 0.0, "prox_logp": 0.0, "learn": 1.25, "publish": 0.25}


def status(job_id: int, name: str, state: str = "queued", **more) -> Object:
    return {
        "id": job_id,
        "name": name,
        "state": state,
        "step": 0,
        "max_steps": 3,
        "attempt": 1,
        "reason": None,
        "created": "2026-01-02T03:04:05Z",
        "updated": "2026-01-02T03:04:06Z",
        "phase": None,
        "devices": [],
    } | more


def metric(step: int, reward: float) -> Object:
    return {
        "step": step,
        "version": step - 1,
        "reward_mean": reward,
        "reward_std": 0.5,
        "completion_length_mean": 12.5,
        "completion_length_max": 32,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "loss": 0.01,
        "grad_norm": 0.3,
        "clip_fraction": 0.0,
        "logp_diff_mean": 0.001,
        "overcommit": 2,
        "chunk_tokens": 0,
        "tokens_generated": 800,
        "time": TIME,
    }


def sample(step: int, k: int = 0) -> Object:
    return {
        "step": step,
        "rollout": 10 * step + k,
        "ordinal": step - 1,
        "k": k,
        "prompt": '"What is 2 + 3?"',
        "completion": "It is 5.",
        "finish": "stop",
        "reward": 1.0,
        "resumes": 0,
        "reward_parts": {"exact_number": 1.0, "short": 0.5},
        "advantage": 0.75,
        "tokens": [11, 12, 13],
        "version_steps": [0, 0, 1],
        "behaviour_logps": [-0.5, -0.25, -0.125],
        "staleness": [1, 1, 0],
        "alpha": [0.5, 0.5, 0.0],
    }


class FakeService:
    """Everything the API asks for. `move` changes a job as a running pipeline would, and wakes who listens."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.table: dict[int, Object] = {}
        self.keys: dict[str, int] = {}
        self.submitted: list[SubmitBody] = []
        self.steps: dict[int, list[Object]] = {}
        self.log: dict[int, list[Object]] = {}
        self.text: dict[int, str] = {}
        self.told = asyncio.Event()
        self.exports: list[int | None] = []
        self.export_closed = asyncio.Event()
        self.refusal: Exception | None = None
        self.broken_audit = False
        self.waiting = asyncio.Event()

    # what a test does ---------------------------------------------------------------------------------------------

    def add(self, name: str, state: str = "queued", **more) -> int:
        job_id = len(self.table) + 1
        self.table[job_id] = status(job_id, name, state, **more)
        self.steps[job_id], self.log[job_id], self.text[job_id] = [], [], ""
        return job_id

    def move(self, job_id: int, kind: str, **change) -> None:
        self.table[job_id] |= change
        self.log[job_id].append({"id": len(self.log[job_id]) + 1, "at": "2026-01-02T03:04:07Z", "kind": kind})
        self.told.set()
        self.told = asyncio.Event()

    def learn(self, job_id: int, *rewards: float) -> None:
        for reward in rewards:
            step = len(self.steps[job_id]) + 1
            self.steps[job_id].append(metric(step, reward))
            self.move(job_id, "step", step=step, state="running")

    # what the API asks --------------------------------------------------------------------------------------------

    def ping(self) -> Object:
        return {"version": "0.1.0", "epoch": 7, "pid": 4242}

    def file_path(self, sha256: str) -> Path:
        return self.files / sha256

    async def submit(self, body: SubmitBody) -> Object:
        if self.refusal:
            raise self.refusal
        self.submitted.append(body)
        key = repr((body.spec, sorted(body.files.items())))
        if key in self.keys and not body.again:
            return self.table[self.keys[key]] | {"created": False}
        job_id = self.add(body.spec.get("job", {}).get("name", "job"))
        self.keys[key] = job_id
        self.move(job_id, "submitted")
        return self.table[job_id] | {"created": True}

    async def jobs(self) -> list[Object]:
        return list(self.table.values())

    async def job(self, job_id: JobId) -> Object:
        if job_id not in self.table:
            raise UnknownJobError(f"there is no job {job_id}; `rlhfd ls` lists them")
        return self.table[job_id]

    async def transition(self, job_id: JobId, verb: Verb) -> Object:
        job = await self.job(job_id)
        to = MOVES.get((job["state"], verb))
        if to is None:
            raise UsageError(f"job {job_id} is {job['state']} and can't be asked to {verb}")
        self.move(job_id, verb, state=to)
        return self.table[job_id]

    async def metrics(self, job_id: JobId, after: int) -> list[Object]:
        await self.job(job_id)
        return [m for m in self.steps[job_id] if m["step"] > after]

    async def samples(self, job_id: JobId, n: int) -> list[Object]:
        await self.job(job_id)
        return [sample(m["step"]) for m in reversed(self.steps[job_id])][:n]

    async def events(self, job_id: JobId, after: int, wait: float) -> list[Object]:
        await self.job(job_id)
        told = self.told
        if not self._newer(job_id, after) and wait:
            self.waiting.set()
            try:
                await asyncio.wait_for(told.wait(), wait)
            except TimeoutError:
                return []
        return self._newer(job_id, after)

    def _newer(self, job_id: int, after: int) -> list[Object]:
        return [e for e in self.log[job_id] if e["id"] > after]

    async def logs(self, job_id: JobId, worker: str | None, offset: int) -> Object:
        await self.job(job_id)
        text = self.text[job_id]
        start = max(0, len(text) + offset) if offset < 0 else offset
        return {"text": text[start:], "offset": len(text), "files": [f"{worker or 'daemon'}.1.log"]}

    @asynccontextmanager
    async def export(self, job_id: JobId, version: int | None) -> AsyncIterator[Path]:
        await self.job(job_id)
        if version == 99:
            raise UsageError("version 99 is not there any more; kept are 0 and 3")
        self.exports.append(version)
        directory = self.files / "exported"
        (directory / "nested").mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text('{"model_type": "llama"}')
        (directory / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
        (directory / "nested" / "empty.txt").write_text("")
        try:
            yield directory
        finally:
            self.export_closed.set()

    async def audit(self, job_id: JobId) -> AsyncIterator[Object]:
        await self.job(job_id)
        yield {"phase": "replay", "done": 1, "total": 2}
        if self.broken_audit:
            raise StorageError("the checkpoint of step 3 can't be read; run rlhfd doctor")
        yield {"phase": "replay", "done": 2, "total": 2}
        yield {
            "tokens": 1000,
            "mean_error": 2e-6,
            "max_error": 1e-4,
            "neighbour_mean_error": 0.02,
            "not_rederivable": 0,
            "per_version": [{"version": 0, "tokens": 1000, "mean_error": 2e-6, "max_error": 1e-4}],
        }

    async def doctor(self) -> list[Object]:
        if isinstance(self.refusal, ZeroDivisionError):
            raise self.refusal
        return [{"check": "devices", "ok": True, "detail": "2 core sets, both free", "fix": ""}]
