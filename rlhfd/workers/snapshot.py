"""Write a prompt snapshot: rows one after another, an index of their offsets, a hash over all; durable at the end.

The reading side is `rlhfd.pipeline.prompts`.
"""

import hashlib
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from struct import pack
from typing import BinaryIO

import msgspec

from rlhfd.workers.durable import sync_directory
from rlhfd.workers.render import Rendered

ROWS_FILE = "prompts.bin"
INDEX_FILE = "prompts.idx"
TOKENIZER_FILE = "tokenizer.json"
CANARY_SEQUENCES = 4
CANARY_TOKENS = 48


@dataclass(kw_only=True)
class Written:
    """What a snapshot holds. `columns`: those that every row has; `canary`: the first few prompts, cut short."""

    rows: int = 0
    sha256: str = ""
    tokens_max: int = 0
    tokens_sum: int = 0
    columns: frozenset[str] | None = None
    canary: list[list[int]] = field(default_factory=list[list[int]])

    def count(self, row: Rendered) -> None:
        """Add one row to the account."""
        sequence = row.tokens[:CANARY_TOKENS] if len(row.tokens) > 1 else row.tokens * 2  # log-probs take two tokens
        if len(self.canary) < CANARY_SEQUENCES and sequence not in self.canary:
            self.canary.append(sequence)
        self.rows += 1
        self.tokens_max = max(self.tokens_max, len(row.tokens))
        self.tokens_sum += len(row.tokens)
        self.columns = row.names if self.columns is None else self.columns & row.names


def write_snapshot(rows: Iterable[Rendered], directory: Path, tokenizer_sha256: str) -> Written:
    """Write both files under temporary names, sync, rename. The hash covers the rows and their tokenizer."""
    written, digest = Written(), hashlib.sha256(tokenizer_sha256.encode())
    temporary = [directory / f".tmp-{name}" for name in (ROWS_FILE, INDEX_FILE)]
    with temporary[0].open("wb") as data, temporary[1].open("wb") as index:
        offset = 0
        index.write(pack("<Q", offset))
        for row in rows:
            packed = msgspec.msgpack.encode((_int32(row.tokens), row.text.decode(), row.columns.decode()))
            digest.update(packed)
            data.write(packed)
            offset += len(packed)
            index.write(pack("<Q", offset))
            written.count(row)
        for file in (data, index):
            _sync(file)
    for path, name in zip(temporary, (ROWS_FILE, INDEX_FILE), strict=True):
        path.replace(directory / name)
    sync_directory(directory)
    written.sha256 = digest.hexdigest()
    return written


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file by these bytes, wholly or not at all."""
    temporary = path.with_name(f".tmp-{path.name}")
    with temporary.open("wb") as file:
        file.write(content)
        _sync(file)
    temporary.replace(path)
    sync_directory(path.parent)


def _int32(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
