"""Files in and out: uploads by hash, exports as a tar stream. Disk work runs in threads, a piece at a time."""

import asyncio
import errno
import hashlib
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from rlhfd.errors import DiskFullError, JobFileError, StorageError

PIECE = 1024 * 1024
UPLOAD_PREFIX = ".upload-"


async def receive_file(pieces: AsyncIterator[bytes], target: Path, sha256: str, limit: int) -> int:
    """Write a stream to `target` once its hash is verified, durably: its size in bytes.

    Raises JobFileError for another hash or more than `limit` bytes, DiskFullError, StorageError; nothing is left then.
    """
    try:
        return await _receive(pieces, target, sha256, limit)
    except OSError as error:
        kind = DiskFullError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StorageError
        raise kind(f"can't store an uploaded file in {target.parent}: {error.strerror}") from error


async def _receive(pieces: AsyncIterator[bytes], target: Path, sha256: str, limit: int) -> int:
    handle, name = tempfile.mkstemp(prefix=UPLOAD_PREFIX, dir=target.parent)
    temporary = Path(name)
    digest, size = hashlib.sha256(), 0
    try:
        with os.fdopen(handle, "wb") as out:
            async for piece in pieces:
                size += len(piece)
                if size > limit:
                    raise JobFileError(f"a file of the job is over the limit of {limit} bytes; make it smaller")
                digest.update(piece)
                await asyncio.to_thread(out.write, piece)
            if digest.hexdigest() != sha256:
                raise JobFileError(f"an uploaded file has the hash {digest.hexdigest()}, not {sha256}; send it again")
            await asyncio.to_thread(_sync, out)
        await asyncio.to_thread(_put, temporary, target)
    finally:
        _discard(temporary)
    return size


def _sync(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())


def _put(temporary: Path, target: Path) -> None:
    temporary.replace(target)
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _discard(temporary: Path) -> None:
    temporary.unlink(missing_ok=True)


def remove_partial_uploads(directory: Path) -> int:
    """Delete what uploads left that a dead daemon did not finish: how many."""
    left = list(directory.glob(UPLOAD_PREFIX + "*"))
    for path in left:
        path.unlink(missing_ok=True)
    return len(left)


async def tar_stream(directory: Path) -> AsyncIterator[bytes]:
    """The regular files of a directory as an uncompressed tar, names relative to it, in order."""
    for path in _files(directory):
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            yield _header(path.relative_to(directory), size)
            left = size
            while left:
                piece = await asyncio.to_thread(source.read, min(PIECE, left))
                if not piece:
                    raise StorageError(f"{path} became shorter while it was exported; export again")
                left -= len(piece)
                yield piece
            yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink())


def _header(name: Path, size: int) -> bytes:
    info = tarfile.TarInfo(name.as_posix())
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)
