import asyncio
from dataclasses import replace

import pytest

from rlhfd.core.types import GroupState, StepId, StepState, VersionId, VersionState
from rlhfd.errors import StateError
from rlhfd.store import events, groups, jobs, metrics, progress, rollouts, steps, versions
from tests.store.story import FINGERPRINT, NUMERICS, SETTINGS, Story, submitted


async def test_a_recorded_step_holds_everything_it_will_be_learned_with(story: Story):
    first, second = await story.ready_group(), await story.ready_group()
    step = await story.record(second, first)
    assert (step.n, step.state, step.seed, step.version_out) == (1, StepState.RECORDED, 42, None)
    assert (step.settings, step.numerics, step.fingerprint) == (SETTINGS, NUMERICS, None)
    assert step.groups == (second.id, first.id)
    assert [use.rollout_id for use in step.rollouts] == [r.id for r in (*second.rollouts, *first.rollouts)]
    assert [use.advantage for use in step.rollouts] == [0.1, 1.1, 0.1, 1.1]
    assert await steps.recorded(story.db, story.id) == step
    assert [g.state for g in await groups.groups(story.db, step.groups)] == [GroupState.RESERVED] * 2
    assert await groups.live_groups(story.db, story.id) == ()


async def test_recording_the_same_step_again_gives_the_one_that_is_there(story: Story):
    new = await story.new_step(await story.ready_group())
    step = await steps.record_step(story.db, story.id, new)
    assert await steps.record_step(story.db, story.id, new) == step
    with pytest.raises(StateError, match="step 1 is recorded already"):
        await steps.record_step(story.db, story.id, replace(new, seed=43))


async def test_two_that_record_at_once_record_one(story: Story):
    new = await story.new_step(await story.ready_group())
    one, two = await asyncio.gather(*(steps.record_step(story.db, story.id, new) for _ in range(2)))
    assert one == two


async def test_a_group_is_consumed_once(story: Story):
    group = await story.ready_group()
    await story.apply(await story.record(group))
    with pytest.raises(StateError, match="a consumed group can't reserve"):
        await story.record(group)
    assert await steps.recorded(story.db, story.id) is None


async def test_a_group_that_is_not_complete_is_not_trained_and_nothing_is_recorded(story: Story):
    ready = await story.ready_group()
    (group,) = await story.admit()
    with pytest.raises(StateError, match="a open group can't reserve"):
        await story.record(ready, group)
    assert [g.state for g in await groups.live_groups(story.db, story.id)] == [GroupState.READY, GroupState.OPEN]


async def test_a_group_of_another_job_is_not_trained(story: Story):
    group = await story.ready_group()
    other = await submitted(story.db, "other")
    version = await versions.latest_trained(story.db, other.id)
    new = replace(await story.new_step(group), version_in=version.id)
    with pytest.raises(StateError):
        await steps.record_step(story.db, other.id, new)


async def test_a_step_names_exactly_the_scored_rollouts_of_its_groups(story: Story):
    group, other = await story.ready_group(), await story.ready_group()
    new = await story.new_step(group)
    foreign = (await story.new_step(other)).rollouts[0]
    for uses in (new.rollouts[:1], [*new.rollouts, foreign]):
        with pytest.raises(StateError, match="must name exactly the scored rollouts of its groups"):
            await steps.record_step(story.db, story.id, replace(new, rollouts=uses))
    await steps.record_step(story.db, story.id, new)


async def test_a_failed_rollout_takes_no_part(story: Story):
    (group,) = await story.admit()
    for rollout in group.rollouts:
        await story.generate(rollout)
    await rollouts.score_rollout(story.db, group.rollouts[0].id, {}, 1.0, "", min_scored=1)
    await rollouts.fail_rollout(story.db, group.rollouts[1].id, "died", min_scored=1)
    step = await story.record(await groups.group(story.db, group.id))
    assert [use.rollout_id for use in step.rollouts] == [group.rollouts[0].id]
    facts = await progress.step_facts(story.db, step.id)
    assert [(fact.reward, fact.length) for fact in facts] == [(1.0, 3), (None, 3)]


async def test_a_step_starts_from_the_version_before_it(story: Story):
    group = await story.ready_group()
    new = await story.new_step(group)
    for wrong in (replace(new, n=2), replace(new, version_in=VersionId(99))):
        with pytest.raises(StateError, match=r"step \d can't start from version"):
            await steps.record_step(story.db, story.id, wrong)


async def test_staleness_is_bounded_at_consumption(story: Story):
    old = await story.ready_group(deadline=9)
    for _ in range(3):
        await story.learned_step()
    new = await story.new_step(old, max_staleness=2)
    with pytest.raises(StateError, match="on tokens that are 3 versions old, over max_staleness = 2"):
        await steps.record_step(story.db, story.id, new)
    assert (await groups.group(story.db, old.id)).state is GroupState.READY
    assert (await steps.record_step(story.db, story.id, replace(new, max_staleness=3))).n == 4


async def test_a_group_is_not_trained_after_its_deadline(story: Story):
    old = await story.ready_group(deadline=0)
    await story.learned_step()
    with pytest.raises(StateError, match="step 2 takes ordinal 0 after its deadline 0"):
        await story.record(old)


async def test_an_applied_step_makes_a_version_and_consumes_its_groups(story: Story):
    start = await story.version()
    group = await story.ready_group()
    version = await story.apply(await story.record(group))
    assert (version.step, version.state, version.parent_id) == (1, VersionState.TRAINED, start.id)
    assert version.fingerprint == FINGERPRINT
    job = await jobs.job(story.db, story.id)
    assert (job.step, job.idle_attempts, job.attempt) == (1, 0, 1)
    assert (await groups.group(story.db, group.id)).state is GroupState.CONSUMED
    (step,) = await steps.applied_after(story.db, story.id, 0)
    assert (step.state, step.version_out, step.fingerprint) == (StepState.APPLIED, version.id, FINGERPRINT)
    assert await steps.recorded(story.db, story.id) is None
    assert [event.body for event in await events.after(story.db, story.id, 0) if event.kind == "step"] == [{"step": 1}]


async def test_applying_again_gives_the_version_that_was_made(story: Story):
    step = await story.record(await story.ready_group())
    version = await story.apply(step)
    assert await story.apply(step) == version
    with pytest.raises(StateError, match="a applied step can't apply"):
        await steps.apply_step(story.db, step.id, {**FINGERPRINT, "policy": "zz"}, {}, {})
    with pytest.raises(StateError, match="no step row 99"):
        await steps.apply_step(story.db, StepId(99), FINGERPRINT, {}, {})
    assert await versions.latest_trained(story.db, story.id) == version


async def test_a_fingerprint_comes_back_bit_for_bit(story: Story):
    losses = [0.1 + 0.2, 1e-320, -0.0, 1.7976931348623157e308, 3.0]
    step = await story.record(await story.ready_group())
    await steps.apply_step(story.db, step.id, {**FINGERPRINT, "losses": losses}, {}, {})
    (applied,) = await steps.applied_after(story.db, story.id, 0)
    assert applied.fingerprint is not None
    assert [x.hex() for x in applied.fingerprint["losses"]] == [x.hex() for x in losses]


async def test_a_replay_learns_the_steps_after_its_checkpoint_in_order(story: Story):
    for _ in range(3):
        await story.learned_step()
    assert [step.n for step in await steps.applied_after(story.db, story.id, 0)] == [1, 2, 3]
    assert [step.n for step in await steps.applied_after(story.db, story.id, 2)] == [3]
    assert await steps.applied_after(story.db, story.id, 3) == ()


async def test_metrics_and_samples_are_kept_by_step(story: Story):
    for _ in range(3):
        await story.learned_step()
    await progress.set_publish_time(story.db, story.id, 2, 1.5)
    rows = await metrics.metrics(story.db, story.id, 1)
    assert rows == [{"step": 2, "loss": 0.5, "time": {"publish": 1.5}}, {"step": 3, "loss": 0.5, "time": {}}]
    assert [sample["step"] for sample in await metrics.samples(story.db, story.id, 2)] == [3, 2]


async def test_a_metric_that_is_no_number_becomes_null(story: Story):
    step = await story.record(await story.ready_group())
    await steps.apply_step(story.db, step.id, FINGERPRINT, {"entropy": float("nan"), "loss": 1.0}, {})
    assert await metrics.metrics(story.db, story.id) == [{"step": 1, "entropy": None, "loss": 1.0}]


async def test_progress_tells_where_a_job_stands(story: Story):
    assert await progress.progress(story.db, story.id) == progress.Progress(
        applied=0, recorded=None, planned=0, saved=0, published=0, lost=0
    )
    version = await story.learned_step()
    await versions.publish(story.db, version.id)
    group = await story.ready_group(deadline=3, admitted=1)
    await story.record(group)
    assert await progress.progress(story.db, story.id) == progress.Progress(
        applied=1, recorded=2, planned=2, saved=0, published=1, lost=0
    )
