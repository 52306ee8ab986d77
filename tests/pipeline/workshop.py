"""One job's context over a real database, without any process: what the tests of the pipeline's parts start from."""

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rlhfd.config import Settings, parse_job, resolved
from rlhfd.core.placement import Device
from rlhfd.core.types import Group, Job, Ordinal, Rollout, VersionStep
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.nursery import Nursery
from rlhfd.pipeline.prompts import INDEX_FILE, ROWS_FILE, Snapshot
from rlhfd.store import epochs, groups, jobs
from rlhfd.store.db import Database

EOS = 2
LIMIT = 160  # max_completion_length: two rows and a half


def write_snapshot(directory: Path, rows: int = 8) -> None:
    """Row n is the tokens (n, n + 1, n + 2)."""
    data, offsets = b"", [0]
    for n in range(rows):
        tokens = struct.pack("<3i", n, n + 1, n + 2)
        data += msgspec.msgpack.encode((tokens, json.dumps(f"say {n}"), json.dumps({"answer": str(n)})))
        offsets.append(len(data))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ROWS_FILE).write_bytes(data)
    (directory / INDEX_FILE).write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))


def job_spec(**changes: dict[str, Any]) -> dict[str, Any]:
    """A resolved job of two groups of two rollouts a step; each keyword overrides keys of its section."""
    spec: dict[str, Any] = {
        "job": {"name": "tiny", "seed": 7, "max_steps": 4},
        "model": {"model_name_or_path": "/nowhere", "dtype": "float32"},
        "data": {"source": "jsonl:prompts.jsonl"},
        "reward": [{"type": "function", "path": "rewards.py:vowels"}],
        "rollout": {"groups_per_step": 2, "num_generations": 2, "max_completion_length": LIMIT},
        "checkpoint": {"save_steps": 2},
    }
    for section, keys in changes.items():
        spec[section] = {**spec.get(section, {}), **keys}
    return resolved(parse_job(spec))


@dataclass(kw_only=True)
class Workshop:
    """A claimed job and its context."""

    db: Database
    job: Job
    context: Context

    @classmethod
    async def open(cls, db: Database, root: Path, **changes: dict[str, Any]) -> "Workshop":
        epoch = await epochs.begin_epoch(db, pid=1, boot_id="boot", version="0.1")
        spec = job_spec(**changes)
        config = parse_job(spec)
        submission = jobs.Submission(
            submit_key="key", name="tiny", spec=spec, spec_sha="5", facts={}, max_steps=config.job.max_steps
        )
        job, _ = await jobs.submit(db, submission)
        claimed = await jobs.claim(db, job.id, epoch)
        assert claimed is not None
        write_snapshot(root / "prompts")
        (root / "weights").mkdir()
        device = Device(id="cpu:0", kind="cpu", name="core", memory=0, cores=(0,))
        context = Context(
            job_id=job.id,
            attempt=1,
            epoch=epoch,
            config=config,
            settings=Settings(),
            db=db,
            nursery=Nursery(db),
            snapshot=Snapshot.open(root / "prompts"),
            model_dir=root / "model",
            eos_token_ids=frozenset({EOS}),
            canary=((1, 2, 3),),
            max_model_len=256,
            max_streams=4,
            engine_module="none",
            devices={"generator": (device,), "learner": (device,)},
            job_dir=root,
            run_dir=root,
            weights_dir=root / "weights",
        )
        return cls(db=db, job=claimed, context=context)

    def limits(self, **seconds: float) -> None:
        """Other deadlines."""
        settings = self.context.settings
        deadlines = settings.deadlines.model_copy(update=seconds)
        self.context = replace(self.context, settings=settings.model_copy(update={"deadlines": deadlines}))

    async def admit(self, count: int = 1) -> tuple[Group, ...]:
        first = await groups.next_ordinal(self.db, self.job.id)
        rows = [(Ordinal(n), n % 8, VersionStep(4)) for n in range(first, first + count)]
        return await groups.admit(self.db, self.job.id, rows, 2, VersionStep(0))

    async def rollout(self, group: Group, k: int = 0) -> Rollout:
        """As it is now."""
        return (await groups.group(self.db, group.id)).rollouts[k]
