from pathlib import Path

from rlhfd.core.types import JobState, RolloutState
from rlhfd.store import children, chunks, epochs, events, groups, jobs, rollouts, steps
from rlhfd.store.db import Database
from tests.store.story import Story, begin


async def test_epochs_only_rise(db: Database):
    assert [await begin(db) for _ in range(3)] == [1, 2, 3]
    assert db.epoch == 3


async def test_recovery_makes_partials_of_what_was_in_flight_and_keeps_the_rest(story: Story):
    ready = await story.ready_group()
    step = await story.record(await story.ready_group())
    (group,) = await story.admit()
    await rollouts.start_rollout(story.db, group.rollouts[0].id, story.epoch)
    await story.append(group.rollouts[0].id, 0, 5)
    for _ in range(2):  # a second recovery finds what the first has left
        await begin(story.db)
        stored = await groups.group(story.db, group.id)
        assert [r.state for r in stored.rollouts] == [RolloutState.PARTIAL, RolloutState.PENDING]
        assert stored.rollouts[0].n_tokens == 5
        assert len(await chunks.chunks(story.db, group.rollouts[0].id)) == 1
        assert await groups.group(story.db, ready.id) == ready
        assert await steps.recorded(story.db, story.id) == step
        job = await jobs.job(story.db, story.id)
        assert (job.state, job.attempt) == (JobState.RUNNING, 1)
    counts = [e.body["partials"] for e in await events.after(story.db, None, 0) if e.kind == "daemon_started"]
    assert counts == [0, 1, 0]


async def test_attempts_that_crashed_without_a_step_count_and_clean_exits_do_not(story: Story):
    async def restart() -> int:
        epoch = await begin(story.db)
        job = await jobs.claim(story.db, story.id, epoch)
        assert job is not None
        return job.idle_attempts

    assert [await restart() for _ in range(2)] == [2, 3]
    await epochs.mark_clean_exit(story.db)
    assert await restart() == 1
    assert await restart() == 2
    await story.learned_step()
    assert await restart() == 1
    started = [e.body["clean"] for e in await events.after(story.db, None, 0) if e.kind == "daemon_started"]
    assert started == [True, False, False, True, False, False]


async def test_the_epoch_survives_a_restart(path: Path):
    for expected in (1, 2, 3):
        async with await Database.open(path) as db:
            assert await begin(db) == expected


# --- children


def child(pid: int = 100, *, boot_id: str = "boot", epoch: int = 1, ticks: int = 5) -> children.ChildRow:
    return children.ChildRow(
        pid=pid, session_id=pid, started_ticks=ticks, boot_id=boot_id, epoch=epoch, job_id=None, role="learner"
    )


async def test_a_child_is_stale_once_its_epoch_is_over(db: Database):
    await begin(db)
    mine = child()
    await children.record_child(db, mine)
    await children.record_child(db, mine)
    assert await children.stale_children(db, "boot") == ()
    await begin(db)
    assert await children.stale_children(db, "boot") == (mine,)
    await children.forget_child(db, mine)
    await children.forget_child(db, mine)
    assert await children.stale_children(db, "boot") == ()


async def test_before_an_epoch_begins_every_child_is_stale(path: Path):
    async with await Database.open(path) as db:
        await begin(db)
        await children.record_child(db, child())
    async with await Database.open(path) as db:
        assert await children.stale_children(db, "boot") == (child(),)


async def test_children_of_an_earlier_boot_are_gone(db: Database):
    await children.record_child(db, child(1, boot_id="before"))
    await children.record_child(db, child(2))
    assert await children.stale_children(db, "boot") == (child(2),)
    assert await db.read(lambda c: c.execute("SELECT count(*) FROM child").fetchone()[0]) == 1


async def test_a_pid_that_is_used_again_is_another_child(db: Database):
    await children.record_child(db, child(ticks=5))
    await children.record_child(db, child(ticks=6))
    await children.forget_child(db, child(ticks=5))
    assert await children.stale_children(db, "boot") == (child(ticks=6),)
