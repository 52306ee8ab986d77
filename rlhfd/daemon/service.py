"""What the API asks, answered from the store; changes go through the supervisor."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rlhfd
from rlhfd.api.service import Object, SubmitBody, Verb
from rlhfd.core.types import Desired, Event, Job, JobId, JobState
from rlhfd.daemon.audit import audit
from rlhfd.daemon.doctor import checks
from rlhfd.daemon.export import exported
from rlhfd.daemon.house import House
from rlhfd.daemon.logs import read_log, roles
from rlhfd.daemon.submit import Desk
from rlhfd.daemon.supervisor import ACTIVE, BY_OWNER, BY_OWNER_CANCELLED, Supervisor
from rlhfd.errors import UsageError
from rlhfd.pipeline.run import Stop
from rlhfd.store import events, jobs, metrics

LOG_EVENTS = 1000  # ids back from the newest: where `rlhfd logs` begins


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonService:
    """Implements api.service.Service."""

    house: House
    desk: Desk
    supervisor: Supervisor

    def ping(self) -> Object:
        """{version, epoch, pid}."""
        return {"version": rlhfd.__version__, "epoch": self.house.epoch, "pid": os.getpid()}

    def file_path(self, sha256: str) -> Path:
        """Where the file with this hash is, or belongs."""
        return self.house.state.file(sha256)

    async def submit(self, body: SubmitBody) -> Object:
        """Status and `created`."""
        job, created = await self.desk.submit(body)
        self.supervisor.poke()
        return {**self._status(job), "created": created}

    async def jobs(self) -> list[Object]:
        """Every job's status, oldest first."""
        return [self._status(job) for job in await jobs.jobs(self.house.db)]

    async def job(self, job_id: JobId) -> Object:
        """One job's status."""
        return self._status(await jobs.job(self.house.db, job_id))

    async def transition(self, job_id: JobId, verb: Verb) -> Object:
        """pause, cancel: at once where it does not run, else when its run has wound down. resume, retry: queued."""
        job = await jobs.job(self.house.db, job_id)
        match verb:
            case "pause":
                if not await self._stopped(job, Stop.PAUSE):
                    await jobs.pause(self.house.db, job_id, BY_OWNER)
            case "cancel":
                if not await self._stopped(job, Stop.CANCEL):
                    await jobs.cancel(self.house.db, job_id, BY_OWNER_CANCELLED)
            case "resume" | "retry":
                _refuse_unless(job, verb)
                await jobs.requeue(self.house.db, job_id)
        self.supervisor.poke()
        return await self.job(job_id)

    async def _stopped(self, job: Job, stop: Stop) -> bool:
        """Through its run where it has one: acknowledged tokens are committed first. False: the move is still to make.

        From the first write on nobody claims the job any more, and a daemon that dies before the last keeps the
        promise at its next start.
        """
        if job.state not in ACTIVE:
            return False
        await jobs.set_desired(self.house.db, job.id, Desired(stop.value))
        await self.supervisor.stop(job.id, stop)
        open_states = ACTIVE if stop is Stop.PAUSE else ACTIVE | {JobState.PAUSED}
        return (await jobs.job(self.house.db, job.id)).state not in open_states

    async def metrics(self, job_id: JobId, after: int) -> list[Object]:
        """The applied steps past `after`, in order."""
        await jobs.job(self.house.db, job_id)
        return await metrics.metrics(self.house.db, job_id, after)

    async def samples(self, job_id: JobId, n: int) -> list[Object]:
        """At most `n` samples, newest first."""
        await jobs.job(self.house.db, job_id)
        return await metrics.samples(self.house.db, job_id, n)

    async def events(self, job_id: JobId, after: int, wait: float) -> list[Object]:
        """Events past id `after`; with none there, waits up to `wait` seconds for the next."""
        await jobs.job(self.house.db, job_id)
        return [_event(event) for event in await events.wait_newer(self.house.db, job_id, after, wait)]

    async def logs(self, job_id: JobId, worker: str | None, offset: int) -> Object:
        """{text, offset, files}; without a role the job's events, a JSON line each, and the offset counts those."""
        await jobs.job(self.house.db, job_id)
        directory = self.house.state.job(job_id) / "logs"
        if worker is not None:
            return read_log(directory, worker, offset)
        newest = await events.newest(self.house.db, job_id)
        after = max(0, newest - LOG_EVENTS) if offset < 0 else offset
        found = await events.after(self.house.db, job_id, after)
        text = "".join(json.dumps(_event(event)) + "\n" for event in found)
        return {"text": text, "offset": found[-1].id if found else max(after, 0), "files": roles(directory)}

    def export(self, job_id: JobId, version: int | None) -> AbstractAsyncContextManager[Path]:
        """A plain Hugging Face directory, there while the context is open."""
        return exported(self.house, self.supervisor, job_id, version)

    def audit(self, job_id: JobId) -> AsyncIterator[Object]:
        """Progress objects; the last object is the report."""
        return audit(self.house, self.supervisor, job_id)

    async def doctor(self) -> list[Object]:
        """The checks that only the daemon can make."""
        return checks(self.house)

    def _status(self, job: Job) -> dict[str, Any]:
        return {
            "id": job.id,
            "name": job.name,
            "state": job.state.value,
            "step": job.step,
            "max_steps": job.max_steps,
            "attempt": job.attempt,
            "reason": job.reason,
            "created": _iso(job.created_us),
            "updated": _iso(job.updated_us),
            "phase": self.supervisor.phase(job.id),
            "devices": self.supervisor.devices(job.id),
        }


_TAKES = {"resume": {JobState.PAUSED}, "retry": {JobState.FAILED, JobState.CANCELLED}}


def _refuse_unless(job: Job, verb: Verb) -> None:
    if job.state not in _TAKES[verb]:
        wanted = " or ".join(sorted(state.value for state in _TAKES[verb]))
        raise UsageError(f"job {job.id} is {job.state.value}; {verb} takes a {wanted} one")


def _iso(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(event: Event) -> Object:
    return {**event.body, "id": event.id, "at": _iso(event.us), "kind": event.kind}
