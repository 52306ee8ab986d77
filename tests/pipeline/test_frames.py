"""From the tables to the learner's frames."""

from array import array
from dataclasses import replace

from rlhfd.pipeline.frames import LOST, group_frames, labelled_frames
from rlhfd.store import chunks, rollouts, versions
from tests.pipeline.test_learn import record
from tests.pipeline.workshop import EOS, Workshop


class TestFrames:
    async def test_of_a_step_are_its_rollouts_as_recorded(self, shop: Workshop):
        step = await record(shop)
        frames = await group_frames(shop.context, step)
        assert [frame.ordinal for frame in frames] == [0, 1]
        members = [member for frame in frames for member in frame.rollouts]
        assert [member.id for member in members] == [use.rollout_id for use in step.rollouts]
        assert [(m.advantage, m.minibatch, m.micro_batch, m.skipped) for m in members] == [
            (use.advantage, use.minibatch, use.micro_batch, use.skipped) for use in step.rollouts
        ]
        prompt = array("i", shop.context.snapshot.row(1).tokens).tobytes()
        assert frames[1].rollouts[0].prompt == prompt
        assert members[0].tokens == array("i", [5, EOS]).tobytes()
        assert members[0].versions == array("i", [0, 0]).tobytes()

    async def test_leave_out_a_rollout_that_the_step_does_not_use(self, shop: Workshop):
        step = await record(shop)
        frames = await group_frames(shop.context, replace(step, rollouts=step.rollouts[1:]))
        assert [len(frame.rollouts) for frame in frames] == [1, 2]

    async def test_by_label_hold_every_rollout_with_such_a_token(self, shop: Workshop):
        await record(shop)
        assert [frame.ordinal for frame in await labelled_frames(shop.context, [0])] == [0, 1]
        assert await labelled_frames(shop.context, [1]) == []

    async def test_by_label_give_tokens_of_a_lost_version_a_label_next_to_nobodys(self, shop: Workshop):
        """An audit compares a version's tokens, and those of the one before: before version 0 that is -1."""
        (group,) = await shop.admit()
        made = await shop.db.write(
            lambda c: (
                c.execute(
                    "INSERT INTO policy_version (job_id, step, state, created_us) VALUES (?, 1, 'lost', 0)",
                    (shop.job.id,),
                ).lastrowid
            )
        )
        await rollouts.start_rollout(shop.db, group.rollouts[0].id, shop.context.epoch)
        zero = (await versions.latest_trained(shop.db, shop.job.id)).id
        for start, version in enumerate((zero, made)):
            token, logp = array("i", [5]).tobytes(), array("f", [-1.0]).tobytes()
            await chunks.append_chunk(shop.db, group.rollouts[0].id, start, token, logp, version)
        ((member,),) = [frame.rollouts for frame in await labelled_frames(shop.context, [-1, 0])]
        assert member.versions == array("i", [0, LOST]).tobytes()
        assert LOST not in {-1, 0}
