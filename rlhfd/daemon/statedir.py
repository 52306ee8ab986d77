"""The state directory: what lies where, and the lock that keeps a second daemon out.

rlhfd.db  lock  ballast  backups/  files/<sha256>  prompts/<sha256>/  jobs/<id>/{checkpoints/<version>, logs/}
"""

import fcntl
import os
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self, TextIO

from rlhfd.api.transfer import remove_partial_uploads
from rlhfd.core.types import Epoch, JobId
from rlhfd.errors import AlreadyRunningError, StorageError

BALLAST = 64 * 1024 * 1024  # bytes kept back; a sixteenth of a small file system
SHM = Path("/dev/shm")  # noqa: S108  RAM-backed, for publications; names carry the state directory's hash and the epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDir:
    """Paths below one root; the lock is held while `lock` is open."""

    root: Path
    lock: TextIO

    @classmethod
    def take(cls, root: Path) -> Self:
        """Make it if need be and lock it. Raises AlreadyRunningError, StorageError."""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o750)
            for name in ("files", "prompts", "jobs", "logs", "run", "tmp"):
                (root / name).mkdir(exist_ok=True, mode=0o700 if name == "run" else 0o750)
            lock = (root / "lock").open("a+")
        except OSError as error:
            raise StorageError(
                f"the state directory {root} can't be used: {error.strerror}; check its owner"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise AlreadyRunningError(
                f"another rlhfd daemon uses {root}; stop it, or choose another directory with --state-dir"
            ) from None
        return cls(root=root, lock=lock)

    def lay_ballast(self) -> bool:
        """Keep some room back, in which a pause or a cancel is written on a full disk; False where there is too little.

        That much again must be free to lay it.
        """
        ballast, usage = self.root / "ballast", shutil.disk_usage(self.root)
        size = min(BALLAST, usage.total // 16)
        if ballast.exists():
            return True
        if usage.free < 2 * size:
            return False
        try:
            with ballast.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            ballast.unlink(missing_ok=True)
            return False
        return True

    def drop_ballast(self) -> bool:
        """Make its room free; False where there was none."""
        try:
            (self.root / "ballast").unlink()
        except FileNotFoundError:
            return False
        return True

    @property
    def database(self) -> Path:
        """The one file that only the store opens."""
        return self.root / "rlhfd.db"

    def file(self, digest: str) -> Path:
        """A carried file, by its SHA-256."""
        return self.root / "files" / digest

    def prompts(self, digest: str) -> Path:
        """A prompt snapshot, by the SHA-256 of its rows."""
        return self.root / "prompts" / digest

    def job(self, job_id: JobId) -> Path:
        """Checkpoints and logs of one job."""
        return self.root / "jobs" / str(job_id)

    def run(self, job_id: JobId) -> Path:
        """Where sockets of one job's engines go: private, for an engine's development endpoints are open there."""
        wanted = self.root / "run" / str(job_id)
        if len(os.fsencode(wanted)) > 80:  # sun_path is 107 bytes long
            return _elsewhere() / f"rlhfd-{self._tag}-{job_id}"
        return wanted

    def weights(self, job_id: JobId, epoch: Epoch, needed: int) -> Path:
        """Where publications go: RAM where three fit, else the state directory."""
        roomy = SHM.is_dir() and shutil.disk_usage(SHM).free > 3 * needed
        return SHM / f"rlhfd-{self._tag}-{epoch}-{job_id}" if roomy else self.job(job_id) / "weights"

    def clear_leftovers(self) -> None:
        """Remove what other epochs left in RAM, sockets, half-made snapshots and uploads; only with the lock held."""
        ours = f"rlhfd-{self._tag}-*"
        inside = (child for name in ("tmp", "run") for child in (self.root / name).iterdir())
        for path in (*SHM.glob(ours), *_elsewhere().glob(ours), *inside, *(self.root / "jobs").glob("*/weights")):
            shutil.rmtree(path, ignore_errors=True)
        remove_partial_uploads(self.root / "files")

    @property
    def _tag(self) -> str:
        """Names what is ours in shared directories; another one made under the same path is another."""
        identity = f"{self.root.resolve()} {os.fstat(self.lock.fileno()).st_ino}"
        return sha256(identity.encode()).hexdigest()[:8]


def make_private(directory: Path) -> None:
    """Make it, for our own user alone."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)


def _elsewhere() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))  # noqa: S108
