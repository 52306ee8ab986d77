"""Log files of a job's children: `<role>.<attempt>.log`."""

from pathlib import Path
from typing import Any

from rlhfd.errors import UsageError

MOST = 1024 * 1024  # bytes an answer


def roles(directory: Path) -> list[str]:
    """The roles that have written a log."""
    return sorted({path.name.partition(".")[0] for path in directory.glob("*.log")})


def read_log(directory: Path, worker: str, offset: int) -> dict[str, Any]:
    """{text, offset, files} from byte `offset` of a role's newest log; negative: as many bytes before its end.

    Raises UsageError for a role that has none.
    """
    if worker not in roles(directory):
        raise UsageError(f"there is no log of {worker!r}; there are: {', '.join(roles(directory)) or 'none'}")
    wanted = sorted(directory.glob(f"{worker}.*.log"), key=lambda path: path.stat().st_mtime)
    with wanted[-1].open("rb") as log:
        size = log.seek(0, 2)
        start = max(0, size + offset) if offset < 0 else min(offset, size)
        log.seek(start)
        data = log.read(MOST)
    return {"text": data.decode(errors="replace"), "offset": start + len(data), "files": roles(directory)}
