"""What every part of one job's pipeline is handed: its settings, its rows, its devices, its directories."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhfd.config import JobConfig, Settings
from rlhfd.core.placement import Device, Role
from rlhfd.core.types import Epoch, JobId
from rlhfd.pipeline.nursery import Nursery
from rlhfd.pipeline.prompts import Snapshot
from rlhfd.store import events
from rlhfd.store.db import Database


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One attempt at one job. `devices`: the lease, role -> devices; `attempt` names its log files.

    `engine_module`: what `python -m` runs as the generator; `max_streams`: requests it takes at once.
    """

    job_id: JobId
    attempt: int
    epoch: Epoch
    config: JobConfig
    settings: Settings
    db: Database
    nursery: Nursery
    snapshot: Snapshot
    model_dir: Path
    eos_token_ids: frozenset[int]
    canary: tuple[tuple[int, ...], ...]
    max_model_len: int
    max_streams: int
    engine_module: str
    devices: Mapping[Role, tuple[Device, ...]]
    job_dir: Path  # state directory's jobs/<id>
    run_dir: Path  # sockets of this job's engines, mode 0700
    weights_dir: Path  # RAM-backed where it fits: publications

    @property
    def max_steps(self) -> int:
        """Learner steps of the job: a submitted one always says how many."""
        return self.config.job.max_steps

    @property
    def shared(self) -> bool:
        """Learner and generator take turns on one device."""
        return str(self.config.resources.learner).startswith("share:")

    def cores(self, role: Role) -> tuple[int, ...] | None:
        """CPU cores of a role's core sets; None on GPUs, where it floats."""
        return tuple(core for device in self.devices[role] for core in device.cores) or None

    def gpus(self, role: Role) -> tuple[str, ...]:
        """UUIDs of a role's GPUs."""
        return tuple(device.id for device in self.devices[role] if device.kind == "gpu")

    def log_path(self, role: str) -> Path:
        """Log file of a child in this attempt."""
        return self.job_dir / "logs" / f"{role}.{self.attempt}.log"

    async def event(self, kind: str, **body: object) -> None:
        """Tell the user something, durably."""
        await events.add(self.db, self.job_id, kind, body)
