"""Chunks: committed tokens of a rollout, acknowledged one COMMIT at a time.

Invariant 1: what `append_chunk` has returned for is durable. Invariant 2: a chunk has one version.
"""

import sqlite3
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfd.core.types import Chunk, GroupId, JobId, RolloutId, RolloutState, VersionId, VersionStep
from rlhfd.errors import StateError, UnknownJobError
from rlhfd.store.db import Database
from rlhfd.store.moves import guard
from rlhfd.store.queries import query

_EXTEND = query("extend_rollout")
_VERSION_STEP = query("version_step")
_CHUNKS = query("rollout_chunks")
_TOKENS = query("tokens_committed")
_STEP_BYTES = struct.Struct("<i")
TOKEN_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutData:
    """All committed tokens of a rollout. tokens int32 [T], logps float32 [T], versions int32 [T] (steps), as bytes."""

    id: RolloutId
    group_id: GroupId
    k: int
    tokens: bytes
    logps: bytes
    versions: bytes


async def append_chunk(  # noqa: PLR0917 - a chunk is written in the order in which it is stored
    db: Database,
    rollout_id: RolloutId,
    start: int,
    tokens: bytes,
    logps: bytes,
    version_id: VersionId,
    *,
    finish: str | None = None,
) -> bool:
    """Append int32 [n] tokens and float32 [n] log-probs at `start`; True, or False for one that was there already.

    Rule "chunk", with `finish` ("stop", "length"; n may then be 0) also rule "finish", one transaction. Guard:
    n_tokens = start. Of a count of 0 the same bytes at the same place are a duplicate, which changes nothing; anything
    else raises StateError: a gap, other bytes, or a rollout that is not being generated.
    """
    chunk = _NewChunk(rollout_id=rollout_id, start=start, tokens=tokens, logps=logps, version_id=version_id)
    if len(tokens) != len(logps) or len(tokens) % TOKEN_BYTES or not (tokens or finish):
        raise StateError(
            f"a chunk of rollout {rollout_id} has {len(tokens)} bytes of tokens, {len(logps)} of log-probs"
        )
    return await db.write(lambda connection: chunk.append(connection, finish))


@dataclass(frozen=True, kw_only=True, slots=True)
class _NewChunk:
    rollout_id: RolloutId
    start: int
    tokens: bytes
    logps: bytes
    version_id: VersionId

    @property
    def n(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def append(self, connection: sqlite3.Connection, finish: str | None) -> bool:
        values = {"id": self.rollout_id, "start": self.start, "n": self.n, "step": self._step(connection)}
        values |= {**guard(RolloutState, "finish" if finish else "append"), "finish": finish}
        if connection.execute(_EXTEND, values).rowcount == 0:
            self._check_duplicate(connection, finish)
            return False
        if self.n:
            connection.execute(
                "INSERT INTO chunk (rollout_id, start, n, version_id, tok, lp) VALUES (?, ?, ?, ?, ?, ?)",
                (self.rollout_id, self.start, self.n, self.version_id, self.tokens, self.logps),
            )
        return True

    def _step(self, connection: sqlite3.Connection) -> int:
        row = connection.execute(_VERSION_STEP, {"id": self.rollout_id, "version_id": self.version_id}).fetchone()
        if row is None:
            raise StateError(f"version {self.version_id} is not of the job that rollout {self.rollout_id} belongs to")
        return row["step"]

    def _check_duplicate(self, connection: sqlite3.Connection, finish: str | None) -> None:
        sql = "SELECT state, n_tokens, finish FROM rollout WHERE id = ?"
        rollout = connection.execute(sql, (self.rollout_id,)).fetchone()
        if rollout is None:
            raise StateError(f"no rollout {self.rollout_id}")
        name = f"the chunk at token {self.start} of rollout {self.rollout_id}"
        if self.start > rollout["n_tokens"]:
            raise StateError(f"{name} leaves a gap: it has {rollout['n_tokens']} tokens")
        repeated = finish is None or (rollout["finish"] == finish and self.start + self.n == rollout["n_tokens"])
        if not (repeated and self._is_stored(connection)):
            raise StateError(f"{name} is not what is stored there ({rollout['state']}, {rollout['n_tokens']} tokens)")

    def _is_stored(self, connection: sqlite3.Connection) -> bool:
        sql = "SELECT tok, lp, version_id FROM chunk WHERE rollout_id = ? AND start = ?"
        row = connection.execute(sql, (self.rollout_id, self.start)).fetchone()
        if row is None:
            return self.n == 0
        return (row["tok"], row["lp"], row["version_id"]) == (self.tokens, self.logps, self.version_id)


async def chunks(db: Database, rollout_id: RolloutId) -> tuple[Chunk, ...]:
    """The committed chunks of a rollout, in order."""
    return await db.read(lambda connection: _chunks(connection, rollout_id))


async def tokens(db: Database, rollout_id: RolloutId) -> bytes:
    """Its committed tokens, int32 [n_tokens]."""
    return await db.read(lambda connection: b"".join(chunk.tokens for chunk in _chunks(connection, rollout_id)))


async def rollout_data(
    db: Database, group_ids: Sequence[GroupId], *, lost_as: VersionStep | None = None
) -> dict[RolloutId, RolloutData]:
    """Every rollout of these groups with its tokens, in the order of the groups, then k (one group: one frame).

    `lost_as`: what to label tokens of lost versions with, whose weights nobody can make again; None: their step.
    """

    def data(connection: sqlite3.Connection) -> dict[RolloutId, RolloutData]:
        found: dict[RolloutId, RolloutData] = {}
        for group_id in group_ids:
            for row in connection.execute("SELECT id, grp_id, k FROM rollout WHERE grp_id = ? ORDER BY k", (group_id,)):
                found[RolloutId(row["id"])] = _data(row, _chunks(connection, row["id"], lost_as))
        return found

    return await db.read(data)


async def tokens_committed(db: Database, job_id: JobId) -> int:
    """Tokens that the job has been given so far, also those that retention has deleted. Raises UnknownJobError."""

    def count(connection: sqlite3.Connection) -> int:
        row = connection.execute(_TOKENS, {"job_id": job_id}).fetchone()
        if row is None:
            raise UnknownJobError(f"no job has the id {job_id}")
        return row[0]

    return await db.read(count)


def _data(row: sqlite3.Row, chunks: Sequence[Chunk]) -> RolloutData:
    return RolloutData(
        id=RolloutId(row["id"]),
        group_id=GroupId(row["grp_id"]),
        k=row["k"],
        tokens=b"".join(chunk.tokens for chunk in chunks),
        logps=b"".join(chunk.logps for chunk in chunks),
        versions=b"".join(_STEP_BYTES.pack(chunk.version_step) * chunk.n for chunk in chunks),
    )


def _chunks(
    connection: sqlite3.Connection, rollout_id: RolloutId, lost_as: VersionStep | None = None
) -> tuple[Chunk, ...]:
    return tuple(
        Chunk(
            rollout_id=RolloutId(row["rollout_id"]),
            start=row["start"],
            version_id=VersionId(row["version_id"]),
            version_step=VersionStep(row["step"]) if lost_as is None or not row["lost"] else lost_as,
            tokens=row["tok"],
            logps=row["lp"],
        )
        for row in connection.execute(_CHUNKS, {"id": rollout_id})
    )
