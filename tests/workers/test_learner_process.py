"""The learner as the daemon has it: a process that answers frames, outlives its faults, and replays exactly."""

import asyncio
import math
from dataclasses import replace

import pytest

from rlhfd.core import wire
from rlhfd.core.procfs import start_ticks
from rlhfd.errors import BadCheckpointError, EngineDiedError, JobFileError, LearnerFault, NonFiniteError
from tests.workers.learner_process import running_learner
from tests.workers.steps import group_frames, ints, learn_frame, load_frame, make_rollouts, session_of

STEPS = 3


@pytest.fixture(scope="module")
def plan(tiny_model):
    """Three steps over different rollouts, two minibatches each, with labels of several versions."""
    policy = session_of(tiny_model).policy
    return {
        step: [
            replace(r, minibatch=number // 3, micro_batch=number % 3 // 2)
            for number, r in enumerate(make_rollouts(policy, version=step - 1, seed=step))
        ]
        for step in range(1, STEPS + 1)
    }


async def learn(client, plan, step):
    return await client.learn(learn_frame(plan[step], step), group_frames(plan[step]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_steps_replayed_from_a_checkpoint_in_another_process_have_the_same_bits(
    tiny_model, plan, tmp_path, dtype
):
    saved = tmp_path / "checkpoints" / "1"
    async with running_learner(tmp_path / "log") as first:
        await first.client.load(load_frame(tiny_model, dtype=dtype))
        await learn(first.client, plan, 1)
        await first.client.checkpoint(wire.Checkpoint(dir=str(saved), version_id=1, epoch=7))
        recorded = [(await learn(first.client, plan, step)).fingerprint for step in (2, 3)]
        canary = await first.client.publish(
            wire.Publish(dir=str(tmp_path / "a"), noise_seed=None, canary=[ints([5, 6])])
        )
        await first.kill()
    async with running_learner(tmp_path / "log") as second:
        loaded = await second.client.load(load_frame(tiny_model, saved, dtype=dtype))
        assert loaded.step == 1
        replayed = [(await learn(second.client, plan, step)).fingerprint for step in (2, 3)]
        again = await second.client.publish(
            wire.Publish(dir=str(tmp_path / "b"), noise_seed=None, canary=[ints([5, 6])])
        )
    assert replayed == recorded
    assert again.canary == canary.canary
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


async def test_a_learner_outlives_its_faults_and_is_then_what_it_was(tiny_model, plan, tmp_path):
    async with running_learner(tmp_path / "log") as learner:
        client = learner.client
        with pytest.raises(LearnerFault, match="no model is loaded"):
            await learn(client, plan, 1)
        with pytest.raises(JobFileError, match="can't be loaded"):
            await client.load(load_frame(tmp_path))
        with pytest.raises(BadCheckpointError, match="incomplete"):
            await client.load(load_frame(tiny_model, tmp_path))
        await client.load(load_frame(tiny_model))
        poisoned = [replace(plan[1][0], logps=[math.nan] * len(plan[1][0].logps)), *plan[1][1:]]
        with pytest.raises(NonFiniteError) as caught:
            await client.learn(learn_frame(poisoned, 1), group_frames(poisoned))
        assert caught.value.rollout_ids == (100,)
        with pytest.raises(LearnerFault, match="step 2 from version 1") as misplaced:
            await learn(client, plan, 2)
        assert "Traceback" in misplaced.value.trace
        after_faults = await learn(client, plan, 1)
        await client.load(load_frame(tiny_model))
        assert (await learn(client, plan, 1)).fingerprint == after_faults.fingerprint


async def test_every_micro_batch_is_a_sign_of_life(tiny_model, plan, tmp_path):
    async with running_learner(tmp_path / "log") as learner:
        await learner.client.load(load_frame(tiny_model))
        learner.progress.clear()
        await learn(learner.client, plan, 1)
        assert learner.progress == ["learn minibatch 0"] * 2 + ["learn minibatch 1"] * 2


async def test_shutdown_ends_it_with_status_zero_and_a_vanished_daemon_with_one(tmp_path):
    async with asyncio.timeout(60), running_learner(tmp_path / "log") as learner:
        assert start_ticks(learner.process.pid)
        await learner.client.shutdown(deadline=30)
        assert await learner.process.wait() == 0
    async with asyncio.timeout(60), running_learner(tmp_path / "log") as learner:
        learner.client.close()
        assert await learner.process.wait() == 1


async def test_a_killed_learner_is_an_engine_that_died(tmp_path):
    async with running_learner(tmp_path / "log") as learner:
        await learner.kill()
        with pytest.raises(EngineDiedError):
            await learner.client.export(wire.Export(dir=str(tmp_path / "out")))
