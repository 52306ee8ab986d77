"""What every part of one job's pipeline is handed: its settings, its rows, its devices, its directories."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhfd.config import JobConfig, Settings
from rlhfd.core.placement import Device
from rlhfd.core.types import Epoch, JobId
from rlhfd.pipeline.prompts import Snapshot
from rlhfd.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """One attempt at one job. `devices`: the lease, role -> devices; `attempt` names its log files."""

    job_id: JobId
    attempt: int
    epoch: Epoch
    config: JobConfig
    settings: Settings
    store: Store
    snapshot: Snapshot
    model_dir: Path
    eos_token_ids: frozenset[int]
    canary: tuple[tuple[int, ...], ...]
    devices: Mapping[str, tuple[Device, ...]]
    job_dir: Path  # state directory's jobs/<id>
    run_dir: Path  # sockets of this job's engines, mode 0700
    weights_dir: Path  # RAM-backed where it fits: publications

    def log_path(self, role: str) -> Path:
        """Log file of a child in this attempt."""
        return self.job_dir / "logs" / f"{role}.{self.attempt}.log"

    async def event(self, kind: str, **body: object) -> None:
        """Tell the user something, durably."""
        await self.store.events.add(self.job_id, kind, body)
