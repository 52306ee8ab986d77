"""The queue, the leases and the ends of attempts, over real tables; the runs are the test's."""

import asyncio
import errno
from pathlib import Path

import pytest

from rlhfd.core.types import Desired, JobState
from rlhfd.daemon import supervisor as module
from rlhfd.errors import DiskFullError, StorageError, UsageError, WeightSyncError
from rlhfd.pipeline.run import Stop
from rlhfd.store import epochs, jobs

pytestmark = pytest.mark.timeout(60)


class TestTheQueue:
    async def test_is_first_come_first_served_within_a_priority(self, site):
        first, second, urgent = await site.submit(), await site.submit(), await site.submit(priority=5)
        site.start()
        (await site.running(urgent.id)).finish()
        (await site.running(first.id)).finish()
        (await site.running(second.id)).finish()
        await site.settled(second.id, "done")

    async def test_says_what_a_job_waits_for(self, site):
        holder, waiting, behind = await site.submit(), await site.submit(), await site.submit()
        site.start()
        await site.running(holder.id)
        await site.until(behind.id, "waiting")
        assert await site.state(waiting.id) == (
            "queued",
            "needs 2 devices, free are 0 of 2; waits for cpu:0 (job 1), cpu:1 (job 1)",
        )
        assert await site.state(behind.id) == ("queued", "waits behind job 2")

    async def test_lets_nobody_overtake_a_job_that_waits_for_devices(self, site):
        shared = {"generator": 1, "learner": "share:generator"}
        holder = await site.submit(resources=shared)
        big, small = await site.submit(), await site.submit(resources=shared)
        site.start()
        run = await site.running(holder.id)
        await site.until(small.id, "waiting", reason=f"waits behind job {big.id}")
        assert site.supervisor.devices(small.id) == []
        run.finish()
        await site.running(big.id)
        assert (await site.state(small.id))[0] == "queued"

    async def test_runs_two_jobs_at_once_on_disjoint_devices(self, site):
        shared = {"generator": 1, "learner": "share:generator"}
        one, two = await site.submit(resources=shared), await site.submit(resources=shared)
        site.start()
        await site.running(one.id)
        await site.running(two.id)
        assert {*site.supervisor.devices(one.id), *site.supervisor.devices(two.id)} == {"cpu:0", "cpu:1"}

    async def test_starts_a_follower_when_the_job_before_it_is_done(self, site):
        first = await site.submit()
        follower = await site.submit(after=first.id)
        site.start()
        (await site.running(first.id)).finish()
        await site.running(follower.id)

    async def test_goes_on_after_a_job_that_asks_for_more_than_there_is(self, site):
        greedy = await site.submit(resources={"generator": 7, "learner": 1})
        modest = await site.submit()
        site.start()
        await site.until(greedy.id, "state", state="failed")
        await site.running(modest.id)

    async def test_gives_up_a_job_that_has_cost_several_daemons_without_a_step(self, site):
        job, db = await site.submit(), site.house.db
        for _ in range(site.house.settings.retries):
            epoch = await epochs.begin_epoch(db, pid=1, boot_id="boot", version="0.1")
            await db.write(lambda connection: connection.execute("UPDATE daemon SET clean_exit = 0"))
            await jobs.claim(db, job.id, epoch)
        epoch = await epochs.begin_epoch(db, pid=1, boot_id="boot", version="0.1")
        object.__setattr__(site.house, "epoch", epoch)
        site.start()
        await site.until(job.id, "state", state="failed")
        assert "3 attempts without an applied step" in (await site.state(job.id))[1]


def open_snapshots() -> int:
    """Descriptors of this process on files of prompt snapshots."""
    found = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("/prompts/" in str(path.readlink()) for path in found)


class TestTheEndOfAnAttempt:
    @pytest.mark.parametrize(
        ("error", "state", "reason"),
        [
            (WeightSyncError("stale head"), "failed", "stale head"),
            (RuntimeError("oops"), "failed", "rlhfd has a bug: RuntimeError: oops; see logs/daemon.log"),
            (DiskFullError("no room left in x"), "paused", "no room left in x; make room, then: rlhfd resume 1"),
            (OSError(errno.ENOSPC, "full", "/x"), "paused", "no room left in /x; make room, then: rlhfd resume 1"),
        ],
    )
    async def test_by_an_error_frees_the_devices_and_says_why(self, site, error, state, reason):
        job, following = await site.submit(), await site.submit()
        site.start()
        (await site.running(job.id)).fail(error)
        await site.settled(job.id, state)
        assert await site.state(job.id) == (state, reason)
        await site.running(following.id)

    async def test_leaves_no_descriptor_and_no_directory(self, site):
        job = await site.submit()
        site.start()
        run = await site.running(job.id)
        assert open_snapshots() == 2
        mine = (run.context.run_dir, run.context.weights_dir)
        assert [path.stat().st_mode & 0o777 for path in mine] == [0o700, 0o700]
        run.finish()
        await site.settled(job.id, "done")
        assert [path for path in mine if path.exists()] == []
        assert open_snapshots() == 0

    async def test_keeps_the_devices_until_it_is_written_down(self, site, monkeypatch):
        job = await site.submit()
        site.start()
        run = await site.running(job.id)
        writing, go = asyncio.Event(), asyncio.Event()
        original = jobs.finish

        async def slow(*args):
            writing.set()
            await go.wait()
            return await original(*args)

        monkeypatch.setattr(module.jobs, "finish", slow)
        run.finish()
        await writing.wait()
        assert site.supervisor.devices(job.id) == ["cpu:0", "cpu:1"]
        go.set()
        await site.settled(job.id, "done")

    async def test_is_written_again_once_a_full_disk_has_room(self, site, monkeypatch):
        monkeypatch.setattr(module, "RECHECK", 0.0)
        job, tries = await site.submit(), []
        site.start()
        run = await site.running(job.id)
        original = jobs.finish

        async def full(*args):
            tries.append(args)
            if len(tries) < 3:
                raise DiskFullError("no room")
            return await original(*args)

        monkeypatch.setattr(module.jobs, "finish", full)
        run.finish()
        await site.settled(job.id, "done")
        assert len(tries) == 3

    async def test_that_the_store_can_not_take_ends_the_daemon(self, site, monkeypatch):
        job = await site.submit()
        site.start()
        run = await site.running(job.id)

        async def broken(*_):
            raise StorageError("the outcome is unknown")

        monkeypatch.setattr(module.jobs, "finish", broken)
        run.finish()
        with pytest.raises(StorageError, match="outcome is unknown"):
            await site.task
        site.task = None

    async def test_after_its_owner_moved_the_job_changes_nothing(self, site):
        job = await site.submit()
        site.start()
        run = await site.running(job.id)
        await jobs.cancel(site.house.db, job.id, "by hand")
        run.finish()
        follower = await site.submit()
        await site.running(follower.id)
        assert await site.state(job.id) == ("cancelled", "by hand")

    async def test_by_a_full_disk_pauses_the_others_but_not_those_asked_to_end(self, site):
        shared = {"generator": 1, "learner": "share:generator"}
        one, two = await site.submit(resources=shared), await site.submit(resources=shared)
        site.start()
        first, second = await site.running(one.id), await site.running(two.id)
        second.winds_down = asyncio.Event()
        cancelling = asyncio.create_task(site.service.transition(two.id, "cancel"))
        async with asyncio.timeout(10):
            while second.asked is None:
                await asyncio.sleep(0)
        first.fail(DiskFullError("no room"))
        await site.settled(one.id, "paused")
        assert second.asked is Stop.CANCEL
        second.winds_down.set()
        assert (await cancelling)["state"] == "cancelled"


class TestAPromise:
    @pytest.mark.parametrize(("desired", "state"), [(Desired.PAUSE, "paused"), (Desired.CANCEL, "cancelled")])
    async def test_that_a_dying_daemon_did_not_keep_is_kept_at_the_next_start(self, site, desired, state):
        """pause and cancel are asked for first; a kill before the run has wound down leaves the job running."""
        job, db = await site.submit(), site.house.db
        await jobs.claim(db, job.id, site.house.epoch)
        await jobs.set_desired(db, job.id, desired)
        epoch = await epochs.begin_epoch(db, pid=1, boot_id="boot", version="0.1")
        object.__setattr__(site.house, "epoch", epoch)
        site.start()
        await site.until(job.id, "state", state=state)

    async def test_made_to_a_queued_job_is_kept_too(self, site):
        job = await site.submit()
        await jobs.set_desired(site.house.db, job.id, Desired.PAUSE)
        site.start()
        await site.until(job.id, "state", state="paused")


class TestItsOwner:
    async def test_pauses_and_resumes_a_running_job(self, site):
        job = await site.submit()
        site.start()
        await site.running(job.id)
        status = await site.service.transition(job.id, "pause")
        assert (status["state"], status["reason"], status["devices"]) == ("paused", "paused by its owner", [])
        await site.service.transition(job.id, "resume")
        assert (await site.running(job.id)).context.attempt == 2

    async def test_cancels_a_job_whose_run_met_a_full_disk_meanwhile(self, site):
        job = await site.submit()
        site.start()
        run = await site.running(job.id)
        run.ask = lambda _: run.fail(DiskFullError("no room"))
        assert (await site.service.transition(job.id, "cancel"))["state"] == "cancelled"

    async def test_pauses_a_job_in_the_moment_it_is_claimed(self, site, monkeypatch):
        """Its run never begins, or is ended: no run goes on under a paused job."""
        job = await site.submit()
        claiming, go = asyncio.Event(), asyncio.Event()
        original = jobs.claim

        async def slow(*args):
            claiming.set()
            await go.wait()
            return await original(*args)

        monkeypatch.setattr(module.jobs, "claim", slow)
        site.start()
        await claiming.wait()
        pausing = asyncio.create_task(site.service.transition(job.id, "pause"))
        assert (await pausing)["state"] == "paused"
        assert site.supervisor.devices(job.id) == []

    async def test_pauses_a_queued_job(self, site):
        job = await site.submit()
        assert (await site.service.transition(job.id, "pause"))["state"] == "paused"
        assert (await jobs.job(site.house.db, job.id)).desired is Desired.PAUSE

    @pytest.mark.parametrize("verb", ["pause", "cancel", "resume"])
    async def test_is_told_what_a_done_job_does_not_take(self, site, verb):
        job = await site.submit()
        site.start()
        (await site.running(job.id)).finish()
        await site.settled(job.id, "done")
        with pytest.raises(UsageError):
            await site.service.transition(job.id, verb)
        assert (await jobs.job(site.house.db, job.id)).desired is Desired.RUN

    async def test_retries_a_failed_job(self, site):
        job = await site.submit()
        site.start()
        (await site.running(job.id)).fail(WeightSyncError("stale"))
        await site.settled(job.id, "failed")
        await site.service.transition(job.id, "retry")
        await site.running(job.id)


class TestADrain:
    async def test_leaves_jobs_running_for_the_next_epoch(self, site):
        job, waiting = await site.submit(), await site.submit()
        site.start()
        run = await site.running(job.id)
        await site.supervisor.drain()
        assert run.asked is Stop.DRAIN
        assert (await jobs.job(site.house.db, job.id)).state is JobState.RUNNING
        assert (await jobs.job(site.house.db, waiting.id)).state is JobState.QUEUED

    async def test_cuts_short_what_has_not_begun(self, site, monkeypatch):
        job, begun = await site.submit(), asyncio.Event()

        async def claim(*_):
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(module.jobs, "claim", claim)
        site.start()
        await begun.wait()
        await site.supervisor.drain()
        assert (await jobs.job(site.house.db, job.id)).state is JobState.QUEUED


class TestABorrowedDevice:
    async def test_is_nobody_elses_until_it_is_given_back(self, site):
        devices = site.supervisor.borrow(1, "audit of job 9")
        job = await site.submit()
        site.start()
        await site.until(job.id, "waiting")
        assert (await site.state(job.id))[1] == "needs 2 devices, free are 1 of 2; waits for cpu:0 (audit of job 9)"
        site.supervisor.give_back(devices)
        await site.running(job.id)

    async def test_keeps_its_own_job_waiting_while_the_audit_reads(self, site):
        job = await site.submit()
        devices = site.supervisor.borrow(1, f"audit of job {job.id}")
        site.start()
        await site.until(job.id, "waiting")
        assert (await site.state(job.id))[1] == f"waits for the audit of job {job.id}"
        site.supervisor.give_back(devices)
        await site.running(job.id)

    async def test_is_refused_while_jobs_hold_all(self, site):
        job = await site.submit()
        site.start()
        await site.running(job.id)
        with pytest.raises(UsageError, match="no device is free for the export"):
            site.supervisor.borrow(1, "export")


async def test_a_full_disk_stops_the_queue_with_a_reason(site, monkeypatch):
    monkeypatch.setattr(type(site.house.state), "lay_ballast", lambda _: False)
    job = await site.submit()
    site.start()
    await site.until(job.id, "waiting")
    assert (await site.state(job.id))[1] == f"waits for room: the disk that holds {site.house.state.root} is full"
