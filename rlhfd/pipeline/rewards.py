"""From a job's [[reward]] list to its pool of worker processes."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfd.config import JobConfig, resolved
from rlhfd.core.types import Epoch, JobId
from rlhfd.core.wire import RewardSetup
from rlhfd.engines.process import Child, ChildSpec
from rlhfd.engines.rewards import RewardPool
from rlhfd.pipeline.nursery import Nursery

WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPlace:
    """Where a pool lives.

    files: carried name -> SHA-256; columns: the rows' extras; work_dir: becomes the workers' private directories.
    """

    files: Mapping[str, str]
    files_dir: Path
    columns: Sequence[str]
    tokenizer: Path
    work_dir: Path
    log_path: Path
    job_id: JobId | None
    attempt: int
    epoch: Epoch


def reward_pool(config: JobConfig, place: RewardPlace, nursery: Nursery, size: int = WORKERS) -> RewardPool:
    """A pool that has not been started yet; its workers float over all cores and see no GPU."""

    async def spawn(_: int) -> Child:
        return await nursery.spawn(
            ChildSpec(
                role="rewards",
                job_id=place.job_id,
                attempt=place.attempt,
                epoch=place.epoch,
                argv=(sys.executable, "-m", "rlhfd.workers.rewards"),
                log_path=place.log_path,
                channel=True,
            )
        )

    return RewardPool(
        spawn=spawn,
        setup=RewardSetup(
            specs=json.dumps(_specs(config, place.files)),
            files_dir=str(place.files_dir),
            tokenizer_file=str(place.tokenizer),
            columns=list(place.columns),
        ),
        timeouts=[reward.timeout for reward in config.reward],
        size=size,
        work_dir=place.work_dir,
    )


def _specs(config: JobConfig, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The list as the worker reads it: a function's `file` is the name that its bytes are stored under."""
    entries: list[dict[str, Any]] = resolved(config)["reward"]
    return [
        {**entry, "file": files[entry["path"].rpartition(":")[0]]} if entry["type"] == "function" else entry
        for entry in entries
    ]
