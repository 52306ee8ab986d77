"""What only a real GPU can show (`make gpu-check`): the lease reaches the learner, and it learns and replays there."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from rlhfd.config import Deadlines
from rlhfd.core import wire
from rlhfd.core.ledger import reproduces
from rlhfd.core.placement import Lease, place
from rlhfd.core.types import Epoch, JobId
from rlhfd.devices import inventory
from rlhfd.engines.learner import LearnerClient
from rlhfd.engines.process import Child, ChildSpec, spawn
from tests.workers.steps import group_frames, learn_frame, load_frame, make_rollouts, session_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
EPOCH = Epoch(1)


def lease() -> Lease:
    devices = inventory()
    if not any(device.kind == "gpu" for device in devices):
        pytest.skip("no GPU here")
    found = place({"learner": 1}, devices, {})
    assert isinstance(found, Lease)
    return found


async def learner(found: Lease, log: Path) -> tuple[Child, LearnerClient]:
    spec = ChildSpec(
        role="learner",
        job_id=JobId(1),
        attempt=1,
        epoch=EPOCH,
        argv=(sys.executable, "-m", "rlhfd.workers.learner"),
        log_path=log,
        gpus=found.ids,
        channel=True,
    )
    child = await spawn(spec)
    return child, await LearnerClient.connect(child, EPOCH, Deadlines())


def visible(child: Child) -> set[str]:
    """CUDA_VISIBLE_DEVICES of every process in the child's tree."""
    seen = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if os.getsid(int(entry.name)) == child.session_id:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    seen |= {v.decode().partition("=")[2] for v in variables if v.startswith(b"CUDA_VISIBLE_DEVICES=")}
            except (ProcessLookupError, PermissionError, FileNotFoundError):
                continue
    return seen


async def test_a_leased_gpu_is_the_only_one_that_the_learner_sees(tmp_path, tiny_model):
    found = lease()
    child, client = await learner(found, tmp_path / "learner.log")
    loaded = await client.load(load_frame(tiny_model))
    assert loaded.numerics["device"] != "cpu"
    assert visible(child) == set(found.ids)
    await child.terminate(5.0)


async def test_steps_replayed_in_another_process_agree_within_the_stated_tolerance(tmp_path, tiny_model):
    found = lease()
    policy = session_of(tiny_model).policy
    steps = {n: make_rollouts(policy, version=n - 1, seed=n) for n in (1, 2, 3)}
    fingerprints = []
    for attempt in range(2):
        child, client = await learner(found, tmp_path / f"learner.{attempt}.log")
        await client.load(load_frame(tiny_model))
        learned = []
        for number, rollouts in steps.items():
            answer = await client.learn(learn_frame(rollouts, number), group_frames(rollouts))
            learned.append(answer.fingerprint)
        fingerprints.append(learned)
        await asyncio.gather(child.terminate(5.0))
    for first, again in zip(*fingerprints, strict=True):
        assert isinstance(first, wire.Fingerprint)
        assert reproduces(first, again, exact=False)
