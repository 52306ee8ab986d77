"""What the API asks, answered from the store; changes go through the supervisor."""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rlhfd
from rlhfd.api.service import Object, SubmitBody, Verb
from rlhfd.core.types import Desired, Epoch, Event, Job, JobId, JobState
from rlhfd.daemon.audit import audit
from rlhfd.daemon.doctor import checks
from rlhfd.daemon.export import exported
from rlhfd.daemon.logs import read_log
from rlhfd.config import Settings
from rlhfd.daemon.replica import Bench
from rlhfd.daemon.statedir import StateDir
from rlhfd.daemon.submit import Desk
from rlhfd.daemon.supervisor import Supervisor
from rlhfd.errors import UsageError
from rlhfd.pipeline.run import Stop
from rlhfd.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonService:
    """Implements api.service.Service."""

    state: StateDir
    store: Store
    settings: Settings
    desk: Desk
    supervisor: Supervisor
    epoch: Epoch

    def ping(self) -> Object:
        """{version, epoch, pid}."""
        return {"version": rlhfd.__version__, "epoch": self.epoch, "pid": os.getpid()}

    def file_path(self, sha256: str) -> Path:
        """Where the file with this hash is, or belongs."""
        return self.state.file(sha256)

    async def submit(self, body: SubmitBody) -> Object:
        """Status and `created`."""
        job, created = await self.desk.submit(body)
        self.supervisor.poke()
        return {**self._status(job), "created": created}

    async def jobs(self) -> list[Object]:
        """Every job's status, oldest first."""
        return [self._status(job) for job in await self.store.jobs.jobs()]

    async def job(self, job_id: JobId) -> Object:
        """One job's status."""
        return self._status(await self.store.jobs.job(job_id))

    async def transition(self, job_id: JobId, verb: Verb) -> Object:
        """pause, cancel: at once where it does not run, else when its run has wound down. resume, retry: queued."""
        jobs, job = self.store.jobs, await self.store.jobs.job(job_id)
        match verb:
            case "pause" | "cancel":
                stop = Stop(verb)
                _allow(job, verb, {JobState.QUEUED, JobState.RUNNING} | ({JobState.PAUSED} if verb == "cancel" else set()))
                await jobs.set_desired(job_id, Desired(verb))
                if not await self.supervisor.stop(job_id, stop):
                    await (jobs.pause if stop is Stop.PAUSE else jobs.cancel)(job_id, f"{verb}d by its owner")
                    if stop is Stop.CANCEL:
                        await jobs.cancel_dependents(job_id)
            case "resume":
                _allow(job, verb, {JobState.PAUSED})
                await jobs.requeue(job_id)
            case "retry":
                _allow(job, verb, {JobState.FAILED, JobState.CANCELLED})
                await jobs.requeue(job_id)
        self.supervisor.poke()
        return await self.job(job_id)

    async def metrics(self, job_id: JobId, after: int) -> list[Object]:
        """The applied steps past `after`, in order."""
        await self.store.jobs.job(job_id)
        return await self.store.steps.metrics(job_id, after)

    async def samples(self, job_id: JobId, n: int) -> list[Object]:
        """At most `n` samples, newest first."""
        await self.store.jobs.job(job_id)
        return await self.store.steps.samples(job_id, n)

    async def events(self, job_id: JobId, after: int, wait: float) -> list[Object]:
        """Events past id `after`; with none there, waits up to `wait` seconds for the next."""
        await self.store.jobs.job(job_id)
        return [_event(event) for event in await self.store.events.wait_newer(job_id, after, wait)]

    async def logs(self, job_id: JobId, worker: str | None, offset: int) -> Object:
        """{text, offset, files}."""
        await self.store.jobs.job(job_id)
        return read_log(self.state.job(job_id) / "logs", worker, offset)

    def export(self, job_id: JobId, version: int | None) -> AbstractAsyncContextManager[Path]:
        """A plain Hugging Face directory, there while the context is open."""
        return exported(self._bench(), job_id, version)

    def audit(self, job_id: JobId) -> AsyncIterator[Object]:
        """Progress objects; the last object is the report."""
        return audit(self._bench(), job_id)

    async def doctor(self) -> list[Object]:
        """The checks that only the daemon can make."""
        return checks(self.state, self.supervisor)

    def _bench(self) -> Bench:
        return Bench(
            state=self.state, store=self.store, settings=self.settings, supervisor=self.supervisor, epoch=self.epoch
        )

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


def _allow(job: Job, verb: str, states: set[JobState]) -> None:
    if job.state not in states:
        raise UsageError(f"job {job.id} is {job.state.value}: it can't be {_PARTICIPLE[verb]}")


_PARTICIPLE = {"pause": "paused", "cancel": "cancelled", "resume": "resumed", "retry": "retried"}


def _iso(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(event: Event) -> Object:
    return {**event.body, "id": event.id, "at": _iso(event.us), "kind": event.kind}
