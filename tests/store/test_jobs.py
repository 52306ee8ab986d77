import pytest

from rlhfd.core.types import Desired, JobId, JobState, VersionState
from rlhfd.errors import UnknownJobError, UsageError
from rlhfd.store import events, jobs, versions
from rlhfd.store.db import Database
from tests.store.story import Story, begin, submission, submitted


async def test_a_submitted_job_is_stored_whole_with_its_start_model(db: Database):
    job, created = await jobs.submit(db, submission(priority=3))
    assert created
    assert (job.state, job.desired, job.priority, job.step) == (JobState.QUEUED, Desired.RUN, 3, 0)
    assert job.spec == {"rollout": {"max_staleness": 2}}
    assert job.facts == {"model": {"parameters": 3}}
    assert await jobs.job(db, job.id) == job
    start = await versions.latest_trained(db, job.id)
    assert (start.step, start.state, start.parent_id) == (0, VersionState.TRAINED, None)
    assert [event.kind for event in await events.after(db, job.id, 0)] == ["submitted"]


async def test_the_same_key_is_the_same_job_and_writes_nothing(db: Database):
    first = await submitted(db)
    again, created = await jobs.submit(db, submission(name="another name"))
    assert not created
    assert again == first
    assert len(await jobs.jobs(db)) == 1
    assert len(await events.after(db, None, 0)) == 1
    assert await jobs.by_key(db, "key") == first
    assert await jobs.by_key(db, "other") is None


async def test_again_makes_another_job_of_the_same_key(db: Database):
    first = await submitted(db)
    second, created = await jobs.submit(db, submission(), again=True)
    third, _ = await jobs.submit(db, submission(), again=True)
    assert created
    assert len({first.id, second.id, third.id}) == 3
    assert await submitted(db) == first


async def test_an_unknown_id_is_told(db: Database):
    for call in (jobs.job, jobs.finish, jobs.requeue):
        with pytest.raises(UnknownJobError, match="no job has the id 99"):
            await call(db, JobId(99))
    with pytest.raises(UnknownJobError):
        await jobs.set_desired(db, JobId(99), Desired.PAUSE)


async def test_the_queue_is_first_come_first_served_within_a_priority(db: Database):
    epoch = await begin(db)
    made = [(await jobs.submit(db, submission(str(n), priority=p)))[0].id for n, p in enumerate((0, 5, 0, 5))]
    assert [job.id for job in await jobs.queue(db, epoch)] == [made[1], made[3], made[0], made[2]]


async def test_the_queue_leaves_out_what_nobody_wants_to_run_now(db: Database):
    epoch = await begin(db)
    first, paused, unwanted, follower = [await submitted(db, key) for key in "abcd"]
    await jobs.pause(db, paused.id, "by its owner")
    await jobs.set_desired(db, unwanted.id, Desired.CANCEL)
    follower, _ = await jobs.submit(db, submission("e", after=first.id))
    assert follower.id not in {job.id for job in await jobs.queue(db, epoch)}
    assert [job.name for job in await jobs.queue(db, epoch)] == ["story", "story"]
    await jobs.claim(db, first.id, epoch)
    await jobs.finish(db, first.id)
    assert follower.id in {job.id for job in await jobs.queue(db, epoch)}


async def test_a_claim_succeeds_once(db: Database):
    epoch = await begin(db)
    job = await submitted(db)
    claimed = await jobs.claim(db, job.id, epoch)
    assert claimed is not None
    assert (claimed.state, claimed.owner_epoch, claimed.attempt, claimed.idle_attempts) == (
        JobState.RUNNING,
        epoch,
        1,
        1,
    )
    assert await jobs.claim(db, job.id, epoch) is None
    assert await jobs.job(db, job.id) == claimed
    assert await jobs.queue(db, epoch) == ()


async def test_a_running_job_of_an_older_epoch_comes_first_and_is_claimed_again(db: Database):
    first = await begin(db)
    job = await submitted(db)
    await jobs.claim(db, job.id, first)
    second = await begin(db)
    urgent, _ = await jobs.submit(db, submission("urgent", priority=9))
    assert [j.id for j in await jobs.queue(db, second)] == [job.id, urgent.id]
    claimed = await jobs.claim(db, job.id, second)
    assert claimed is not None
    assert (claimed.attempt, claimed.idle_attempts, claimed.owner_epoch) == (2, 2, second)


async def test_a_job_whose_owner_changed_his_mind_is_not_claimed(db: Database):
    epoch = await begin(db)
    job = await submitted(db)
    await jobs.set_desired(db, job.id, Desired.PAUSE)
    assert await jobs.claim(db, job.id, epoch) is None


async def test_the_life_of_a_job(story: Story):
    paused = await jobs.pause(story.db, story.id, "by its owner")
    assert (paused.state, paused.reason, paused.owner_epoch) == (JobState.PAUSED, "by its owner", None)
    await jobs.set_desired(story.db, story.id, Desired.PAUSE)
    queued = await jobs.requeue(story.db, story.id)
    assert (queued.state, queued.desired, queued.reason, queued.idle_attempts) == (
        JobState.QUEUED,
        Desired.RUN,
        None,
        0,
    )
    await jobs.claim(story.db, story.id, story.epoch)
    failed = await jobs.fail(story.db, story.id, "no room")
    assert (failed.state, failed.reason) == (JobState.FAILED, "no room")
    await jobs.requeue(story.db, story.id)
    await jobs.claim(story.db, story.id, story.epoch)
    assert (await jobs.finish(story.db, story.id)).state is JobState.DONE
    states = [e.body["state"] for e in await events.after(story.db, story.id, 0) if e.kind == "state"]
    assert states == ["paused", "queued", "failed", "queued", "done"]


async def test_an_illegal_move_raises_and_changes_nothing(story: Story):
    await jobs.finish(story.db, story.id)
    before = await jobs.job(story.db, story.id), await events.after(story.db, None, 0)
    for move in (jobs.pause, jobs.cancel, jobs.fail):
        with pytest.raises(UsageError, match=r"job 1: a done job can't"):
            await move(story.db, story.id, "why")
    for move in (jobs.finish, jobs.requeue):
        with pytest.raises(UsageError, match=r"job 1: a done job can't"):
            await move(story.db, story.id)
    assert (await jobs.job(story.db, story.id), await events.after(story.db, None, 0)) == before


async def test_a_queued_job_can_not_be_done(db: Database):
    job = await submitted(db)
    with pytest.raises(UsageError, match="a queued job can't finish: only a running one can"):
        await jobs.finish(db, job.id)


async def test_a_failed_job_cancels_what_was_to_follow_it(story: Story):
    second, _ = await jobs.submit(story.db, submission("b", after=story.id))
    third, _ = await jobs.submit(story.db, submission("c", after=second.id))
    other = await submitted(story.db, "d")
    await jobs.fail(story.db, story.id, "no room")
    second, third, other = [await jobs.job(story.db, job.id) for job in (second, third, other)]
    assert [job.state for job in (second, third, other)] == [JobState.CANCELLED, JobState.CANCELLED, JobState.QUEUED]
    assert second.reason == f"job {story.id}, which it was to follow, is failed"
    assert third.reason == f"job {second.id}, which it was to follow, is cancelled"
    assert await jobs.cancel_dependents(story.db, story.id) == ()


async def test_nothing_can_follow_a_job_that_is_lost_or_unknown(story: Story):
    await jobs.cancel(story.db, story.id, "by its owner")
    with pytest.raises(UsageError, match=f"job {story.id} is cancelled, so nothing can follow it"):
        await jobs.submit(story.db, submission("b", after=story.id))
    with pytest.raises(UnknownJobError):
        await jobs.submit(story.db, submission("b", after=JobId(99)))
    assert len(await jobs.jobs(story.db)) == 1


async def test_what_is_noted_on_a_job_stays(story: Story):
    await jobs.set_noise(story.db, story.id, 0.025)
    await jobs.set_reason(story.db, story.id, "waits for 2 GPUs")
    job = await jobs.job(story.db, story.id)
    assert (job.noise, job.reason) == (0.025, "waits for 2 GPUs")


async def test_what_a_job_waits_for_is_told(story: Story):
    await jobs.set_reason(story.db, story.id, "waits for 2 GPUs")
    told = (await events.after(story.db, story.id, 0))[-1]
    assert (told.kind, told.body) == ("waiting", {"reason": "waits for 2 GPUs"})
