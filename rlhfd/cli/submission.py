"""A job file on its way to the daemon: the resolved job, and the bytes of every local file that it names."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfd.cli.client import Daemon, Object
from rlhfd.errors import JobFileError

if TYPE_CHECKING:
    from rlhfd.config import JobConfig

INSPECTION_SECONDS = 3600.0  # the daemon reads the data and may fetch a model before it answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What the job file says, checked; `spec` is it as plain data, `files`: name -> path."""

    config: "JobConfig"
    spec: Object
    files: dict[str, Path]


def read(job_file: Path, sets: Sequence[str]) -> Submission:
    """The job file with `--set` applied. Raises JobFileError."""
    from rlhfd.config import load_job, resolved

    job, files = load_job(job_file, sets)
    return Submission(config=job, spec=resolved(job), files=files)


def send(
    daemon: Daemon, submission: Submission, *, after: int | None = None, priority: int = 0, again: bool = False
) -> Object:
    """Send what the daemon lacks, then the job: its status and `created`. Raises what the daemon answers."""
    hashes = {name: _hash(path) for name, path in submission.files.items()}
    for name, sha256 in hashes.items():
        if not daemon.has_file(sha256):
            daemon.put_file(sha256, submission.files[name])
    body = {"spec": submission.spec, "files": hashes, "after": after, "priority": priority, "again": again}
    return daemon.post("/jobs", body, timeout=INSPECTION_SECONDS)


def _hash(path: Path) -> str:
    try:
        with path.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise JobFileError(f"{path} can't be read ({error.strerror}); the job names it") from error
