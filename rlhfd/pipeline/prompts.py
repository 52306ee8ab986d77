"""The prompt snapshot of a job: what the inspection wrote, read row by row.

    prompts.bin   msgpack [token ids int32, text JSON, columns JSON], one row after another
    prompts.idx   uint64 little-endian offsets into it, rows + 1

A row costs two small reads and no memory, however long the data. The files never change once they are there.
"""

import os
from pathlib import Path
from struct import Struct, unpack
from typing import Self

import msgspec

from rlhfd.core.types import Prompt
from rlhfd.errors import StateError

ROWS_FILE = "prompts.bin"
INDEX_FILE = "prompts.idx"
_SPAN = Struct("<QQ")
_OFFSET_BYTES = 8
_decoder = msgspec.msgpack.Decoder(tuple[bytes, str, str])


class Snapshot:
    """Read-only rows 0 … rows - 1. `open` it, `close` it."""

    def __init__(self, directory: Path, *, data: int, index: int, rows: int) -> None:
        self._directory = directory
        self._data = data
        self._index = index
        self.rows = rows

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open and check the files' sizes against each other. Raises StateError if they are missing or damaged."""
        opened: list[int] = []
        try:
            opened.append(os.open(directory / ROWS_FILE, os.O_RDONLY | os.O_CLOEXEC))
            opened.append(os.open(directory / INDEX_FILE, os.O_RDONLY | os.O_CLOEXEC))
            data, index = opened
            rows, rest = divmod(os.fstat(index).st_size, _OFFSET_BYTES)
            snapshot = cls(directory, data=data, index=index, rows=rows - 1)
            if rest or rows < 2 or snapshot._span(rows - 2)[1] != os.fstat(data).st_size:
                raise snapshot._damaged("its index and its rows do not fit")
        except OSError as error:
            _close(opened)
            raise StateError(f"the prompt snapshot in {directory} can't be read: {error.strerror}") from error
        except StateError:
            _close(opened)
            raise
        return snapshot

    def row(self, number: int) -> Prompt:
        """One prompt. Raises IndexError outside 0 … rows - 1, StateError for a damaged row."""
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} of a snapshot with {self.rows}")
        start, end = self._span(number)
        try:
            tokens, text, columns = _decoder.decode(os.pread(self._data, end - start, start))
        except msgspec.MsgspecError as error:
            raise self._damaged(f"row {number} does not decode ({error})") from error
        return Prompt(row=number, tokens=unpack(f"<{len(tokens) // 4}i", tokens), text=text, columns=columns)

    def close(self) -> None:
        """Give the descriptors back; once."""
        _close([self._data, self._index])

    def _span(self, number: int) -> tuple[int, int]:
        start, end = _SPAN.unpack(os.pread(self._index, _SPAN.size, number * _OFFSET_BYTES))
        if end <= start:
            raise self._damaged(f"row {number} ends before it starts")
        return start, end

    def _damaged(self, why: str) -> StateError:
        return StateError(f"the prompt snapshot in {self._directory} is damaged, {why}: submit the job again")


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
