"""Log files of a job: `<role>.<attempt>.log`, and `job.log`, which has the job's own events."""

from pathlib import Path
from typing import Any

from rlhfd.errors import UsageError

MOST = 1024 * 1024  # bytes an answer
JOB = "job"


def read_log(directory: Path, worker: str | None, offset: int) -> dict[str, Any]:
    """{text, offset, files} from byte `offset` of a role's newest log; negative: as many bytes before its end.

    Without a role: the job's own. Raises UsageError for a role that has none.
    """
    files = sorted((path for path in directory.glob("*.log")), key=lambda path: path.stat().st_mtime)
    roles = sorted({path.name.partition(".")[0] for path in files})
    wanted = [path for path in files if path.name.partition(".")[0] == (worker or JOB)]
    if not wanted:
        if worker is None:
            return {"text": "", "offset": 0, "files": roles}
        raise UsageError(f"there is no log of {worker!r}; there are: {', '.join(roles) or 'none'}")
    with wanted[-1].open("rb") as log:
        size = log.seek(0, 2)
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        log.seek(start)
        data = log.read(MOST)
    return {"text": data.decode(errors="replace"), "offset": start + len(data), "files": roles}
