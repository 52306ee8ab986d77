import pytest

from rlhfd.core.types import GroupId, GroupState, JobId, Ordinal, RolloutState, VersionStep
from rlhfd.errors import StateError
from rlhfd.store import events, groups, progress, rollouts
from tests.store.story import K, Story, submitted


async def test_an_admitted_group_has_its_rollouts_to_come(story: Story):
    first, second = await story.admit(2, deadline=4, admitted=1)
    assert (first.ordinal, first.row, first.deadline, first.state) == (0, 0, 4, GroupState.OPEN)
    assert (second.ordinal, second.row) == (1, 7)
    assert [rollout.k for rollout in first.rollouts] == list(range(K))
    assert all(rollout.state is RolloutState.PENDING for rollout in first.rollouts)
    assert await groups.live_groups(story.db, story.id) == (first, second)
    assert await groups.next_ordinal(story.db, story.id) == 2


async def test_admitting_an_ordinal_again_gives_the_group_that_is_there(story: Story):
    (group,) = await story.admit()
    await rollouts.start_rollout(story.db, group.rollouts[0].id, story.epoch)
    (again,) = await groups.admit(story.db, story.id, [(Ordinal(0), 0, VersionStep(9))], K, VersionStep(5))
    assert (again.id, again.deadline) == (group.id, group.deadline)
    assert again.rollouts[0].state is RolloutState.GENERATING


async def test_another_prompt_under_the_same_ordinal_is_refused(story: Story):
    await story.admit()
    with pytest.raises(StateError, match="ordinal 0 of job 1 is prompt 0 already, not prompt 5"):
        await groups.admit(story.db, story.id, [(Ordinal(0), 5, VersionStep(2))], K, VersionStep(0))


async def test_a_gap_in_the_ordinals_is_refused_and_nothing_of_the_call_is_stored(story: Story):
    entries = [(Ordinal(0), 0, VersionStep(2)), (Ordinal(2), 1, VersionStep(2))]
    with pytest.raises(StateError, match="ordinal 2 of job 1 leaves a gap after 0"):
        await groups.admit(story.db, story.id, entries, K, VersionStep(0))
    assert await groups.live_groups(story.db, story.id) == ()


async def test_ordinals_of_two_jobs_do_not_meet(story: Story):
    other = await submitted(story.db, "other")
    await story.admit(3)
    assert await groups.next_ordinal(story.db, other.id) == 0
    assert await groups.live_groups(story.db, other.id) == ()


async def test_a_dropped_group_is_live_no_more_and_counted_with_its_lengths(story: Story):
    (group,) = await story.admit()
    await story.generate(group.rollouts[0], 3)
    await groups.drop_group(story.db, group.id, "its deadline has passed")
    assert await groups.live_groups(story.db, story.id) == ()
    assert (await groups.group(story.db, group.id)).state is GroupState.DROPPED
    event = (await events.after(story.db, story.id, 0))[-1]
    assert (event.kind, event.body["lengths"], event.body["ordinal"]) == ("group_dropped", [3, 0], 0)
    assert await progress.dropped_at(story.db, story.id, 0) == 1
    assert await progress.dropped_at(story.db, story.id, 1) == 0


async def test_a_group_in_a_step_can_not_be_dropped(story: Story):
    group = await story.ready_group()
    await story.record(group)
    with pytest.raises(StateError, match="a reserved group can't drop: only a open or ready one can"):
        await groups.drop_group(story.db, group.id, "why not")


async def test_live_groups_leave_the_texts_out(story: Story):
    group = await story.ready_group()
    (live,) = await groups.live_groups(story.db, story.id)
    assert live.state is GroupState.READY
    assert [rollout.text for rollout in group.rollouts] == ["text", "text"]
    assert [rollout.text for rollout in live.rollouts] == [None, None]
    assert [rollout.reward for rollout in live.rollouts] == [0.0, 1.0]


async def test_groups_come_in_the_order_asked_for(story: Story):
    first, second = await story.admit(2)
    assert await groups.groups(story.db, [second.id, first.id]) == (second, first)
    with pytest.raises(StateError, match="no group 99"):
        await groups.groups(story.db, [first.id, GroupId(99)])


async def test_a_job_that_is_not_there_gets_no_group(story: Story):
    with pytest.raises(StateError, match="FOREIGN KEY"):
        await groups.admit(story.db, JobId(99), [(Ordinal(0), 0, VersionStep(2))], K, VersionStep(0))
