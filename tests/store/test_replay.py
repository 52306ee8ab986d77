import pytest

from rlhfd.core.types import GroupState, StepState, VersionState
from rlhfd.errors import StateError
from rlhfd.store import checkpoints, events, groups, jobs, metrics, progress, replay, steps, versions
from tests.store.story import FINGERPRINT, Story

LATER = {"torch": "2.14", "threads": "1"}


async def three_and_a_half(story: Story) -> list[int]:
    """Three applied steps and a recorded one; their groups."""
    for _ in range(3):
        await story.learned_step()
    group = await story.ready_group(deadline=5, admitted=3)
    step = await story.record(group)
    return [*(s.groups[0] for s in await steps.applied_after(story.db, story.id, 0)), step.groups[0]]


async def test_a_divergence_records_the_later_steps_again_over_the_same_groups(story: Story):
    members = await three_and_a_half(story)
    before = {step.n: step for step in await steps.applied_after(story.db, story.id, 0)}
    again = await replay.void_from(story.db, story.id, 2, LATER, {"policy": "zz"})
    assert len(again) == 3
    assert (await progress.progress(story.db, story.id)) == progress.Progress(
        applied=1, recorded=2, planned=4, saved=0, published=0, lost=3
    )
    states = [group.state for group in await groups.groups(story.db, members)]
    assert states == [GroupState.CONSUMED, *[GroupState.RESERVED] * 3]
    assert [step.n for step in await steps.applied_after(story.db, story.id, 0)] == [1]
    step = await steps.recorded(story.db, story.id)
    assert step is not None
    assert (step.id, step.n, step.groups, step.numerics) == (again[0], 2, before[2].groups, LATER)
    assert (step.rollouts, step.seed, step.settings) == (before[2].rollouts, before[2].seed, before[2].settings)
    assert step.version_in == before[2].version_in
    (event,) = [e for e in await events.after(story.db, story.id, 0) if e.kind == "replay_diverged"]
    assert event.body == {"step": 2, "steps": 3, "policy": "zz"}


async def test_steps_recorded_again_are_learned_one_after_the_other_under_new_ids(story: Story):
    await three_and_a_half(story)
    old = await versions.steps_by_id(story.db, story.id)
    await replay.void_from(story.db, story.id, 2, LATER, {})
    made = []
    while (step := await steps.recorded(story.db, story.id)) is not None:
        assert step.version_in == (await story.version()).id
        made.append(await steps.apply_step(story.db, step.id, {**FINGERPRINT, "policy": str(step.n)}, {}, {}))
    assert [version.step for version in made] == [2, 3, 4]
    assert not {version.id for version in made} & set(old)
    assert (await jobs.job(story.db, story.id)).step == 4
    assert [step.n for step in await steps.applied_after(story.db, story.id, 0)] == [1, 2, 3, 4]


async def test_lost_versions_keep_their_step_and_are_never_the_newest(story: Story):
    await three_and_a_half(story)
    old = await versions.steps_by_id(story.db, story.id)
    await versions.publish(story.db, (await story.version()).id)
    await replay.void_from(story.db, story.id, 2, LATER, {})
    assert await versions.steps_by_id(story.db, story.id) == old
    assert (await versions.latest_trained(story.db, story.id)).step == 1
    assert await versions.latest_published(story.db, story.id) is None
    states = await story.db.read(lambda c: [row["state"] for row in c.execute("SELECT state FROM policy_version")])
    assert states == [VersionState.TRAINED, VersionState.TRAINED, VersionState.LOST, VersionState.LOST]


async def test_metrics_and_samples_of_void_steps_are_shown_no_more(story: Story):
    await three_and_a_half(story)
    await replay.void_from(story.db, story.id, 2, LATER, {})
    assert [row["step"] for row in await metrics.metrics(story.db, story.id)] == [1]
    assert [sample["step"] for sample in await metrics.samples(story.db, story.id, 9)] == [1]


async def test_the_checkpoint_of_a_lost_version_is_not_loaded_and_goes(story: Story):
    await three_and_a_half(story)
    for step in (1, 3):
        version = {v: k for k, v in (await versions.steps_by_id(story.db, story.id)).items()}[step]
        row = await checkpoints.begin(story.db, story.id, version, f"/c/{step}")
        await checkpoints.commit(story.db, row.id, "sha", 1)
    await replay.void_from(story.db, story.id, 2, LATER, {})
    assert [c.step for c in await checkpoints.newest_valid(story.db, story.id)] == [1]
    assert [c.dir for c in await checkpoints.prune(story.db, story.id, 2)] == ["/c/3"]


async def test_a_step_can_diverge_twice(story: Story):
    await three_and_a_half(story)
    for _ in range(2):
        await replay.void_from(story.db, story.id, 1, LATER, {})
        step = await steps.recorded(story.db, story.id)
        assert step is not None
        await story.apply(step)
    assert (await progress.progress(story.db, story.id)).planned == 4
    void = await story.db.read(lambda c: c.execute("SELECT count(*) FROM step WHERE state = 'void'").fetchone()[0])
    assert void == 8


@pytest.mark.parametrize("n", [4, 5, 0])
async def test_only_an_applied_step_can_diverge(story: Story, n: int):
    await three_and_a_half(story)
    with pytest.raises(StateError, match=f"step {n} of job 1 is not applied: no replay of it can diverge"):
        await replay.void_from(story.db, story.id, n, LATER, {})
    assert (await progress.progress(story.db, story.id)).applied == 3


async def test_a_replay_that_reproduces_its_step_is_an_event(story: Story):
    await story.learned_step()
    (step,) = await steps.applied_after(story.db, story.id, 0)
    await replay.confirm_replay(story.db, step.id)
    assert (await events.after(story.db, story.id, 0))[-1].kind == "replayed"
    assert (await steps.applied_after(story.db, story.id, 0)) == (step,)
    recorded = await story.record(await story.ready_group(deadline=3, admitted=1))
    assert recorded.state is StepState.RECORDED
    with pytest.raises(StateError, match="a recorded step can't confirm"):
        await replay.confirm_replay(story.db, recorded.id)
