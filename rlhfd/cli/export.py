"""`rlhfd export`: a plain Hugging Face directory. The daemon streams a tar; it is unpacked here, as the user."""

import shutil
import tarfile
import tempfile
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import Annotated, cast

import typer

from rlhfd.cli.client import Daemon
from rlhfd.cli.options import AsJson, JobId, daemon
from rlhfd.cli.printing import print_json, size
from rlhfd.errors import StorageError, UsageError

MAKE_SECONDS = 1800.0  # the daemon loads and merges the weights before the first byte

Target = Annotated[Path, typer.Argument(metavar="DIR", help="A directory that is new or empty.")]
Version = Annotated[int | None, typer.Option(metavar="N", min=0, help="The version of step N; default: the newest.")]


def export(
    context: typer.Context, job_id: JobId, target: Target, *, version: Version = None, as_json: AsJson = False
) -> None:
    """Write a version of the model as a plain Hugging Face directory."""
    _refuse_used(target)
    nbytes = _fetch(daemon(context), job_id, version, target)
    if as_json:
        print_json({"dir": str(target.absolute()), "bytes": nbytes, "files": sorted(p.name for p in target.iterdir())})
    else:
        print(f"{target} has {size(nbytes)}")


def _refuse_used(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there and is not empty; name a new directory")


def _fetch(asked: Daemon, job_id: int, version: int | None, target: Path) -> int:
    """Unpack beside the target, then rename: a directory that is there is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    try:
        query = "" if version is None else f"?version={version}"
        with asked.stream("GET", f"/jobs/{job_id}/export{query}", timeout=MAKE_SECONDS) as response:
            nbytes = _unpack(response, temporary)
        temporary.chmod(0o755)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return nbytes


def _unpack(response: HTTPResponse, into: Path) -> int:
    """Regular files with plain relative names only: bytes written. Raises StorageError for anything else."""
    nbytes = 0
    try:
        with tarfile.open(fileobj=response, mode="r|") as tar:
            for member in tar:
                path = into / _plain(member)
                path.parent.mkdir(parents=True, exist_ok=True)
                with cast("tarfile.ExFileObject", tar.extractfile(member)) as source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
                nbytes += member.size
    except (tarfile.TarError, HTTPException) as error:
        raise StorageError(f"the export broke off ({error}); nothing was written, try again") from error
    return nbytes


def _plain(member: tarfile.TarInfo) -> PurePosixPath:
    name = PurePosixPath(member.name)
    if not member.isfile() or name.is_absolute() or ".." in name.parts:
        raise StorageError(f"the export holds {member.name!r}, which is no plain file; nothing was written")
    return name
