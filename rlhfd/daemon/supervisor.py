"""Which job runs where: the queue, the leases, one JobRun per running job.

consumes     jobs that want to run (queued, or `running` under an older epoch: those go on by themselves)
produces     claims, leases, final states with their reasons
waits for    a submission, the end of a run, or `RECHECK` seconds (a GPU that others used may be free by now)
unblocked by `poke`

FIFO within a priority; a failed job frees its devices and the queue goes on.
"""

import asyncio
import logging
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from rlhfd.config import parse_job
from rlhfd.core.faults import NO_ROOM
from rlhfd.core.placement import Device, Lease, Wait, place
from rlhfd.core.types import Desired, Job, JobId, JobState
from rlhfd.daemon.context import make_context
from rlhfd.daemon.house import House
from rlhfd.daemon.statedir import make_private
from rlhfd.daemon.submit import wants
from rlhfd.errors import DiskFullError, JobFileError, RlhfdError, UsageError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.rewards import RewardPlace, reward_pool
from rlhfd.pipeline.run import JobRun, Stop
from rlhfd.store import jobs

RECHECK = 15.0
BY_OWNER = "paused by its owner"
BY_OWNER_CANCELLED = "cancelled by its owner"
ACTIVE = frozenset({JobState.QUEUED, JobState.RUNNING})
log = logging.getLogger("rlhfd.jobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How an attempt ended: the move of its job, None where the job stays `running` for the next epoch."""

    move: Literal["finish", "pause", "cancel", "fail"] | None
    reason: str = ""


@dataclass(kw_only=True, slots=True)
class Running:
    """A job that holds devices. `run` is None while its parts are put together; `why`: if it comes to pause."""

    lease: Lease
    task: "asyncio.Task[None]"
    run: JobRun | None = None
    why: str = BY_OWNER


class Supervisor:
    """Owns the device leases of this daemon."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._running: dict[JobId, Running] = {}
        self._borrowed: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self._fault: BaseException | None = None  # of an attempt that could not even be settled

    def poke(self) -> None:
        """Look at the queue again."""
        self._wake.set()

    def phase(self, job_id: JobId) -> str | None:
        """What a running job is waiting for, in words."""
        running = self._running.get(job_id)
        return None if running is None else "starting" if running.run is None else running.run.phase

    def devices(self, job_id: JobId) -> list[str]:
        """Device ids that a running job holds."""
        running = self._running.get(job_id)
        return [] if running is None else list(running.lease.ids)

    async def run(self) -> None:
        """Until cancelled: fill the devices, wait for news. Raises what kept an attempt from being settled."""
        await self._keep_promises()
        while True:
            self._wake.clear()
            if self._fault is not None:
                raise self._fault
            try:
                if not self._stopping:
                    await self._fill()
                async with asyncio.timeout(RECHECK):
                    await self._wake.wait()
            except DiskFullError as error:
                log.warning("the queue stands still: %s", error)
                await asyncio.sleep(RECHECK)
            except TimeoutError:
                continue

    async def _keep_promises(self) -> None:
        """A pause or cancel that was asked for, and that the end of the daemon cut short, is done now."""
        for job in await jobs.jobs(self._house.db):
            if job.state in ACTIVE and job.desired is not Desired.RUN:
                await self._settle(job.id, _wished(job.desired))

    async def drain(self) -> None:
        """The daemon goes: every run commits its partials and saves; its job stays `running`."""
        self._stopping = True
        for running in self._running.values():
            if running.run is not None:
                running.run.ask(Stop.DRAIN)
            else:
                running.task.cancel()
        await asyncio.gather(*(running.task for running in self._running.values()), return_exceptions=True)

    async def stop(self, job_id: JobId, stop: Stop) -> bool:
        """Ask a running job to pause or cancel; False where it does not run here."""
        running = self._running.get(job_id)
        if running is None:
            return False
        if running.run is not None:
            running.run.ask(stop)
        elif not running.task.cancelling():  # once: a second one would cut short how the first is written down
            running.task.cancel()
        await asyncio.wait({running.task})
        return True

    def borrow(self, count: int, holder: str) -> tuple[Device, ...]:
        """Devices for a short task (audit, export). Raises UsageError while none is free."""
        found = place({"learner": count}, self._house.inventory(), self._leased())
        if isinstance(found, Wait):
            raise UsageError(f"no device is free for the {holder}: {found.reason}; wait, or pause the job that has it")
        for device in found.ids:
            self._borrowed[device] = holder
        return found.devices["learner"]

    def give_back(self, devices: Sequence[Device]) -> None:
        """End of the short task."""
        for device in devices:
            self._borrowed.pop(device.id, None)
        self.poke()

    def _leased(self) -> dict[str, str]:
        held = {device: f"job {job_id}" for job_id, running in self._running.items() for device in running.lease.ids}
        return held | self._borrowed

    async def _fill(self) -> None:
        """Place what can be placed, in order: a job that waits for devices is not overtaken. None on a full disk."""
        ahead: JobId | None = None
        roomy = self._house.state.lay_ballast()
        for job in await jobs.queue(self._house.db, self._house.epoch):
            if job.id in self._running:
                continue
            if job.idle_attempts >= self._house.settings.retries and job.state is JobState.RUNNING:
                idle = f"{job.idle_attempts} attempts without an applied step; see rlhfd logs {job.id}"
                await self._settle(job.id, Ending(move="fail", reason=idle))
            elif not roomy:
                await self._waits(job, f"waits for room: the disk that holds {self._house.state.root} is full")
            elif (task := f"audit of job {job.id}") in self._borrowed.values():  # it reads what retention deletes
                await self._waits(job, f"waits for the {task}")
            elif ahead is not None:
                await self._waits(job, f"waits behind job {ahead}")
            elif not await self._placed(job):
                ahead = job.id

    async def _waits(self, job: Job, reason: str) -> None:
        if job.reason != reason:
            await jobs.set_reason(self._house.db, job.id, reason)

    async def _placed(self, job: Job) -> bool:
        """Lease its devices and start its attempt, which claims it; False where it has to wait."""
        try:
            found = place(wants(parse_job(job.spec)), self._house.inventory(), self._leased())
        except JobFileError as error:
            await self._settle(job.id, Ending(move="fail", reason=str(error)))
            return True
        if isinstance(found, Wait):
            await self._waits(job, found.reason)
            return False
        task = asyncio.create_task(self._attempt(job.id, found), name=f"job {job.id}")
        task.add_done_callback(self._note)
        self._running[job.id] = Running(lease=found, task=task)
        return True

    def _note(self, task: "asyncio.Task[None]") -> None:
        """An attempt whose end could not be written down: the store is broken, and the daemon must not go on."""
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()
            self.poke()

    async def _attempt(self, job_id: JobId, lease: Lease) -> None:
        """One attempt from claim to final state; its devices are free once that is written down."""
        try:
            await self._settle(job_id, await self._ending(job_id, lease))
        finally:
            del self._running[job_id]
            self.poke()

    async def _ending(self, job_id: JobId, lease: Lease) -> Ending:
        """Run it, and say how it ended; the only place where any exception is caught."""
        try:
            job = await jobs.claim(self._house.db, job_id, self._house.epoch)
            if job is None:  # its owner was faster
                return Ending(move=None)
            return self._asked(job_id, await self._with_room(job, lease))
        except asyncio.CancelledError:
            if self._stopping:
                raise
            return _wished((await jobs.job(self._house.db, job_id)).desired)
        except DiskFullError as error:
            why = f"{error}; make room, then: rlhfd resume"
            self._pause_all(why)
            return Ending(move="pause", reason=f"{why} {job_id}")
        except RlhfdError as error:
            return Ending(move="fail", reason=str(error))
        except Exception as error:  # the supervisor: a bug in one job must not end the others
            log.exception("job %d", job_id)
            bug = f"rlhfd has a bug: {type(error).__name__}: {error}; see logs/daemon.log"
            return Ending(move="fail", reason=bug)

    def _asked(self, job_id: JobId, stop: Stop | None) -> Ending:
        """The end of a run that nothing failed."""
        match stop:
            case None:
                return Ending(move="finish")
            case Stop.PAUSE:
                return Ending(move="pause", reason=self._running[job_id].why)
            case Stop.CANCEL:
                return Ending(move="cancel", reason=BY_OWNER_CANCELLED)
            case Stop.DRAIN:
                return Ending(move=None)

    def _pause_all(self, why: str) -> None:
        """The disk is full for all of them, and what was kept back is for their pauses."""
        for job_id, other in self._running.items():
            if other.run is not None and other.run.asked is None:  # what its owner asked for goes first
                other.why = f"{why} {job_id}"
                other.run.ask(Stop.PAUSE)

    async def _with_room(self, job: Job, lease: Lease) -> Stop | None:
        """`_run`; where a file met a full disk, that is what it raises."""
        try:
            return await self._run(job, lease)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise DiskFullError(f"no room left in {error.filename or self._house.state.root}") from error

    async def _run(self, job: Job, lease: Lease) -> Stop | None:
        config = parse_job(job.spec)
        context = make_context(job, config, lease.devices, self._house)
        mine = (context.weights_dir, context.run_dir)
        with closing(context.snapshot):
            try:
                for directory in mine:
                    make_private(directory)
                await context.event("started", attempt=job.attempt, devices=list(lease.ids))
                run = JobRun(context, reward_pool(config, self._rewards(job, context), self._house.nursery))
                self._running[job.id].run = run
                return await run.run()
            finally:
                for directory in mine:
                    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _rewards(self, job: Job, context: Context) -> RewardPlace:
        state = self._house.state
        return RewardPlace(
            files=job.facts["files"],
            files_dir=state.root / "files",
            columns=job.facts["prompts"]["columns"],
            tokenizer=state.prompts(job.facts["prompts"]["sha256"]) / "tokenizer.json",
            work_dir=context.job_dir / "rewards",
            log_path=context.log_path("rewards"),
            job_id=job.id,
            attempt=job.attempt,
            epoch=self._house.epoch,
        )

    async def _settle(self, job_id: JobId, ending: Ending) -> None:
        """Write the end down; while the disk is full, again and again: the job must not seem to run on."""
        while True:
            try:
                return await self._move(job_id, ending)
            except DiskFullError as error:
                log.warning("job %d: its end can't be written down: %s", job_id, error)
                await asyncio.sleep(RECHECK)
            except UsageError as error:
                log.warning("job %d ended as somebody moved it: %s", job_id, error)
                return None

    async def _move(self, job_id: JobId, ending: Ending) -> None:
        db = self._house.db
        match ending.move:
            case "finish":
                await jobs.finish(db, job_id)
            case "pause":
                await jobs.pause(db, job_id, ending.reason)
            case "cancel":
                await jobs.cancel(db, job_id, ending.reason)
            case "fail":
                await jobs.fail(db, job_id, ending.reason)
            case None:
                return


def _wished(desired: Desired) -> Ending:
    """What its owner asked for last, of a job that has no run to ask."""
    if desired is Desired.CANCEL:
        return Ending(move="cancel", reason=BY_OWNER_CANCELLED)
    return Ending(move="pause", reason=BY_OWNER)
