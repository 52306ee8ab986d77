"""From a claimed row and its lease to the context of an attempt."""

from collections.abc import Mapping
from pathlib import Path

from rlhfd.config import JobConfig
from rlhfd.core.placement import Device, Role
from rlhfd.core.types import Job
from rlhfd.daemon.house import House
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.prompts import Snapshot

MASTER_BYTES = 4  # a publication is at most the start model in float32


def make_context(job: Job, config: JobConfig, devices: Mapping[Role, tuple[Device, ...]], house: House) -> Context:
    """Job directories made, snapshot opened (its user closes it); who needs run_dir and weights_dir makes them."""
    model, prompts = job.facts["model"], job.facts["prompts"]
    job_dir = house.state.job(job.id)
    for name in ("checkpoints", "logs"):
        (job_dir / name).mkdir(parents=True, exist_ok=True)
    return Context(
        job_id=job.id,
        attempt=job.attempt,
        epoch=house.epoch,
        config=config,
        settings=house.settings,
        db=house.db,
        nursery=house.nursery,
        snapshot=Snapshot.open(house.state.prompts(prompts["sha256"])),
        model_dir=Path(model["dir"]),
        eos_token_ids=frozenset(model["eos_token_ids"]) | frozenset(config.rollout.stop_token_ids),
        canary=tuple(tuple(sequence) for sequence in job.facts["canary"]),
        max_model_len=config.model.max_model_len or model["max_model_len"],
        max_streams=config.generator.max_num_seqs,
        engine_module=house.settings.generator_module,
        devices=devices,
        job_dir=job_dir,
        run_dir=house.state.run(job.id),
        weights_dir=house.state.weights(job.id, house.epoch, model["parameters"] * MASTER_BYTES),
    )
