"""What the API asks of the daemon. Objects are plain data, as they stand in the JSON answers.

- status: id, name, state, step, max_steps, attempt, reason; created, updated (ISO-8601 Z), phase, devices.
- metrics, one object a step: core/metrics.py's table, `time` an object of seconds.
- sample: as pipeline/samples.py describes it: what the rollout is, and lists with one entry a token.
- event: id, at (ISO-8601 Z), kind, and its body's keys.
- check (doctor): check, ok, detail, fix.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec

from rlhfd.core.types import JobId

Object: TypeAlias = dict[str, Any]
Verb: TypeAlias = Literal["pause", "resume", "cancel", "retry"]
Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class SubmitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A submission: the resolved job with `--set` applied, and the hashes of the files it names, sent before."""

    spec: Object
    files: dict[str, Sha256] = {}
    after: int | None = None
    priority: int = 0
    again: bool = False


class Service(Protocol):
    """The daemon. Unknown ids raise UnknownJobError, forbidden transitions UsageError, the rest as in errors.py."""

    def ping(self) -> Object:
        """{version, epoch, pid}."""
        ...

    def file_path(self, sha256: str) -> Path:
        """Where the file with this hash is, or belongs; its directory exists."""
        ...

    async def submit(self, body: SubmitBody) -> Object:
        """Inspect and queue the job, or find the one of the same key: its status and `created`. JobFileError else."""
        ...

    async def jobs(self) -> list[Object]:
        """Every job's status, oldest first."""
        ...

    async def job(self, job_id: JobId) -> Object:
        """One job's status."""
        ...

    async def transition(self, job_id: JobId, verb: Verb) -> Object:
        """Ask for a change of state: the status after it."""
        ...

    async def metrics(self, job_id: JobId, after: int) -> list[Object]:
        """The applied steps past `after`, in order."""
        ...

    async def samples(self, job_id: JobId, n: int) -> list[Object]:
        """At most `n` samples, newest first."""
        ...

    async def events(self, job_id: JobId, after: int, wait: float) -> list[Object]:
        """Events past id `after`; with none there, waits up to `wait` seconds for the next."""
        ...

    async def logs(self, job_id: JobId, worker: str | None, offset: int) -> Object:
        """{text, offset, files} from byte `offset` of the newest log; negative: as many bytes before its end."""
        ...

    def export(self, job_id: JobId, version: int | None) -> AbstractAsyncContextManager[Path]:
        """A plain Hugging Face directory of a version (default: newest), there while the context is open."""
        ...

    def audit(self, job_id: JobId) -> AsyncIterator[Object]:
        """Progress objects {phase, done, total}; the last object is the report."""
        ...

    async def doctor(self) -> list[Object]:
        """The checks that only the daemon can make."""
        ...
