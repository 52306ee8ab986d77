"""From a claimed row and its lease to the context of an attempt."""

from pathlib import Path

from rlhfd.config import JobConfig, Settings
from rlhfd.core.placement import Lease
from rlhfd.core.types import Epoch, Job
from rlhfd.daemon.statedir import StateDir
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.prompts import Snapshot
from rlhfd.store import Store

MASTER_BYTES = 4  # a publication is at most the start model in float32


def make_context(
    job: Job, config: JobConfig, lease: Lease, state: StateDir, store: Store, settings: Settings, epoch: Epoch
) -> Context:
    """Directories made, snapshot opened; nothing started."""
    model, prompts = job.facts["model"], job.facts["prompts"]
    job_dir = state.job(job.id)
    for name in ("checkpoints", "logs"):
        (job_dir / name).mkdir(parents=True, exist_ok=True)
    return Context(
        job_id=job.id,
        attempt=job.attempt,
        epoch=epoch,
        config=config,
        settings=settings,
        store=store,
        snapshot=Snapshot.open(state.prompts(prompts["sha256"])),
        model_dir=Path(model["dir"]),
        eos_token_ids=frozenset(model["eos_token_ids"]) | frozenset(config.rollout.stop_token_ids),
        canary=tuple(tuple(sequence) for sequence in job.facts["canary"]),
        max_model_len=config.model.max_model_len or model["max_model_len"],
        devices=lease.devices,
        job_dir=job_dir,
        run_dir=state.run(job.id),
        weights_dir=state.weights(job.id, epoch, model["parameters"] * MASTER_BYTES),
    )
