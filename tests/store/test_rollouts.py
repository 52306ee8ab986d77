import math

import pytest

from rlhfd.core.types import Group, GroupState, RolloutId, RolloutState
from rlhfd.errors import StateError
from rlhfd.store import events, groups, rollouts
from tests.store.story import Story


async def generated(story: Story) -> Group:
    (group,) = await story.admit()
    for rollout in group.rollouts:
        await story.generate(rollout)
    return group


async def test_a_rollout_let_go_of_keeps_its_tokens_and_is_taken_on_again(story: Story):
    (group,) = await story.admit()
    rollout = group.rollouts[0]
    await rollouts.start_rollout(story.db, rollout.id, story.epoch)
    await story.append(rollout.id, 0, 4)
    await rollouts.release_rollout(story.db, rollout.id)
    (stored, _) = (await groups.group(story.db, group.id)).rollouts
    assert (stored.state, stored.n_tokens, stored.resumes) == (RolloutState.PARTIAL, 4, 0)
    await rollouts.start_rollout(story.db, rollout.id, story.epoch)
    (stored, _) = (await groups.group(story.db, group.id)).rollouts
    assert (stored.state, stored.n_tokens, stored.resumes) == (RolloutState.GENERATING, 4, 1)


async def test_a_rollout_is_taken_on_by_one_engine_only(story: Story):
    (group,) = await story.admit()
    await rollouts.start_rollout(story.db, group.rollouts[0].id, story.epoch)
    with pytest.raises(StateError, match="a generating rollout can't start: only a pending or partial one can"):
        await rollouts.start_rollout(story.db, group.rollouts[0].id, story.epoch)
    with pytest.raises(StateError, match="a pending rollout can't release"):
        await rollouts.release_rollout(story.db, group.rollouts[1].id)
    with pytest.raises(StateError, match="no rollout 99"):
        await rollouts.start_rollout(story.db, RolloutId(99), story.epoch)


async def test_a_new_attempt_parks_what_the_one_before_had_in_flight(story: Story):
    group, other = await story.admit(2)
    for rollout in (group.rollouts[0], other.rollouts[1]):
        await rollouts.start_rollout(story.db, rollout.id, story.epoch)
        await story.append(rollout.id, 0, 4)
    assert await rollouts.park(story.db, story.id) == 2
    assert await rollouts.park(story.db, story.id) == 0
    states = [r.state for g in await groups.live_groups(story.db, story.id) for r in g.rollouts]
    assert states == [RolloutState.PARTIAL, RolloutState.PENDING, RolloutState.PENDING, RolloutState.PARTIAL]


async def test_the_last_score_makes_the_group_ready(story: Story):
    group = await generated(story)
    first, second = group.rollouts
    assert await rollouts.score_rollout(story.db, first.id, {"exact": 1.0}, 0.5, "42") is GroupState.OPEN
    assert await rollouts.score_rollout(story.db, second.id, {"exact": 0.0}, 0.0, "41") is GroupState.READY
    stored = (await groups.group(story.db, group.id)).rollouts[0]
    assert (stored.state, stored.reward, stored.parts, stored.text) == (RolloutState.SCORED, 0.5, {"exact": 1.0}, "42")


async def test_a_score_that_comes_again_changes_nothing_and_another_one_is_refused(story: Story):
    group = await generated(story)
    rollout_id = group.rollouts[0].id
    await rollouts.score_rollout(story.db, rollout_id, {"exact": 1.0}, 1.0, "42")
    assert await rollouts.score_rollout(story.db, rollout_id, {"exact": 1.0}, 1.0, "42") is GroupState.OPEN
    with pytest.raises(StateError, match="a scored rollout can't score: only a finished one can"):
        await rollouts.score_rollout(story.db, rollout_id, {"exact": 0.0}, 0.0, "42")
    with pytest.raises(StateError, match="a scored rollout can't fail"):
        await rollouts.fail_rollout(story.db, rollout_id, "too late")


async def test_only_a_finished_rollout_is_scored(story: Story):
    (group,) = await story.admit()
    with pytest.raises(StateError, match="a pending rollout can't score"):
        await rollouts.score_rollout(story.db, group.rollouts[0].id, {}, 1.0, "")


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_no_finite_number_is_refused(story: Story, reward: float):
    group = await generated(story)
    with pytest.raises(StateError, match="is no finite number"):
        await rollouts.score_rollout(story.db, group.rollouts[0].id, {"exact": 1.0}, reward, "")
    with pytest.raises(StateError, match="is no finite number"):
        await rollouts.score_rollout(story.db, group.rollouts[0].id, {"exact": reward}, 1.0, "")


async def test_a_group_with_too_few_scores_is_dropped_with_an_event(story: Story):
    group = await generated(story)
    first, second = group.rollouts
    assert await rollouts.fail_rollout(story.db, first.id, "exact (timeout): 10 s") is GroupState.OPEN
    assert await rollouts.score_rollout(story.db, second.id, {"exact": 1.0}, 1.0, "42") is GroupState.DROPPED
    kinds = {event.kind: event.body for event in await events.after(story.db, story.id, 0)}
    assert kinds["reward_failed"]["error"] == "exact (timeout): 10 s"
    assert kinds["group_dropped"]["reason"] == "only 1 of 2 rollouts have a reward"


async def test_a_group_of_which_one_score_is_enough_goes_on_without_the_failed_one(story: Story):
    group = await generated(story)
    first, second = group.rollouts
    await rollouts.score_rollout(story.db, first.id, {"exact": 1.0}, 1.0, "42", min_scored=1)
    assert await rollouts.fail_rollout(story.db, second.id, "died", min_scored=1) is GroupState.READY
    assert await rollouts.fail_rollout(story.db, second.id, "died", min_scored=1) is GroupState.READY
    failures = [event for event in await events.after(story.db, story.id, 0) if event.kind == "reward_failed"]
    assert len(failures) == 1


async def test_a_score_that_comes_after_the_drop_does_not_bring_the_group_back(story: Story):
    group = await generated(story)
    first, second = group.rollouts
    await rollouts.score_rollout(story.db, first.id, {}, 1.0, "")
    await groups.drop_group(story.db, group.id, "its deadline has passed")
    assert await rollouts.score_rollout(story.db, second.id, {}, 1.0, "") is GroupState.DROPPED
