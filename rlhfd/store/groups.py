"""Groups: one prompt each, admitted in the order of their ordinals, with the rollouts that answer it.

Invariant 7: what to do next is a query on these rows; the only cursor is the highest ordinal.
"""

import sqlite3
from collections.abc import Sequence

import msgspec

from rlhfd.core import lifecycle
from rlhfd.core.types import (
    Group,
    GroupId,
    GroupState,
    JobId,
    Ordinal,
    Rollout,
    RolloutId,
    RolloutState,
    VersionStep,
)
from rlhfd.errors import StateError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.moves import guard, refused
from rlhfd.store.queries import query

_INSERT = query("insert_group")
_LIVE_GROUPS = query("live_groups")
_LIVE_ROLLOUTS = query("live_rollouts")
_MOVE = query("move_group")


async def live_groups(db: Database, job_id: JobId) -> tuple[Group, ...]:
    """Groups that are bound to no step (open, ready), by ordinal, with their rollouts; `text` is left out (None)."""

    def live(connection: sqlite3.Connection) -> tuple[Group, ...]:
        rollouts: dict[int, list[Rollout]] = {}
        for row in connection.execute(_LIVE_ROLLOUTS, {"job_id": job_id}):
            rollouts.setdefault(row["grp_id"], []).append(_rollout(row))
        rows = connection.execute(_LIVE_GROUPS, {"job_id": job_id})
        return tuple(_group(row, rollouts.get(row["id"], [])) for row in rows)

    return await db.read(live)


async def groups(db: Database, group_ids: Sequence[GroupId]) -> tuple[Group, ...]:
    """Groups in whatever state, in the order asked for, with their rollouts and texts. Raises StateError."""
    return await db.read(lambda connection: tuple(_fetch(connection, group_id) for group_id in group_ids))


async def group(db: Database, group_id: GroupId) -> Group:
    """One group with its rollouts and their texts. Raises StateError for an id that is not there."""
    return await db.read(lambda connection: _fetch(connection, group_id))


async def next_ordinal(db: Database, job_id: JobId) -> Ordinal:
    """The ordinal that the next admitted group gets: ordinals are 0, 1, 2 … without a gap."""
    return await db.read(lambda connection: _next_ordinal(connection, job_id))


async def admit(
    db: Database,
    job_id: JobId,
    entries: Sequence[tuple[Ordinal, int, VersionStep]],
    num_generations: int,
    admitted_step: VersionStep,
) -> tuple[Group, ...]:
    """The groups of these (ordinal, snapshot row, deadline), with their rollouts to come.

    Rule "sample": group + its rollouts in one transaction. Guard: unique (job, ordinal); an ordinal that is there
    with the same row gives the group as it stands. Raises StateError for another row, or a gap in the ordinals.
    """

    def insert(connection: sqlite3.Connection) -> tuple[Group, ...]:
        return tuple(_admit(connection, job_id, entry, num_generations, admitted_step) for entry in entries)

    return await db.write(insert)


def _admit(
    connection: sqlite3.Connection,
    job_id: JobId,
    entry: tuple[Ordinal, int, VersionStep],
    num_generations: int,
    admitted_step: VersionStep,
) -> Group:
    ordinal, row, deadline = entry
    sql = "SELECT * FROM grp WHERE job_id = ? AND ordinal = ?"
    known = connection.execute(sql, (job_id, ordinal)).fetchone()
    if known is not None:
        if known["row"] != row or known["num_generations"] != num_generations:
            raise StateError(f"ordinal {ordinal} of job {job_id} is prompt {known['row']} already, not prompt {row}")
        return _fetch(connection, known["id"])
    if ordinal != _next_ordinal(connection, job_id):
        raise StateError(
            f"ordinal {ordinal} of job {job_id} leaves a gap after {_next_ordinal(connection, job_id) - 1}"
        )
    values = {"job_id": job_id, "ordinal": ordinal, "row": row, "deadline": deadline, "admitted_step": admitted_step}
    values |= {"num_generations": num_generations, "state": lifecycle.INITIAL[GroupState]}
    group_id = connection.execute(_INSERT, values).fetchone()["id"]
    pending = lifecycle.INITIAL[RolloutState]
    connection.executemany(
        "INSERT INTO rollout (grp_id, k, state) VALUES (?, ?, ?)",
        [(group_id, k, pending) for k in range(num_generations)],
    )
    return _fetch(connection, group_id)


async def drop_group(db: Database, group_id: GroupId, reason: str) -> None:
    """Leave a live group out for good, with an event. Guard: compare and set. Raises StateError if it is not live."""
    now = db.now_us()
    await db.write(lambda connection: drop(connection, group_id, reason, now))


def drop(connection: sqlite3.Connection, group_id: GroupId, reason: str, now: int) -> None:
    """`drop_group` inside a transaction of the caller's."""
    values = {**guard(GroupState, "drop"), "id": group_id, "reason": reason}
    row = connection.execute(_MOVE, values).fetchone()
    if row is None:
        raise refused(connection, GroupState, group_id, "drop")
    sql = "SELECT n_tokens FROM rollout WHERE grp_id = ? ORDER BY k"
    lengths = [length for (length,) in connection.execute(sql, (group_id,))]
    body = {"group": group_id, "ordinal": row["ordinal"], "reason": reason, "lengths": lengths}
    events.insert(connection, row["job_id"], "group_dropped", body, now)


def _next_ordinal(connection: sqlite3.Connection, job_id: JobId) -> Ordinal:
    sql = "SELECT coalesce(max(ordinal) + 1, 0) FROM grp WHERE job_id = ?"
    return Ordinal(connection.execute(sql, (job_id,)).fetchone()[0])


def _fetch(connection: sqlite3.Connection, group_id: GroupId) -> Group:
    row = connection.execute("SELECT * FROM grp WHERE id = ?", (group_id,)).fetchone()
    if row is None:
        raise StateError(f"no group {group_id}")
    rollouts = connection.execute("SELECT * FROM rollout WHERE grp_id = ? ORDER BY k", (group_id,))
    return _group(row, [_rollout(rollout) for rollout in rollouts])


def _group(row: sqlite3.Row, rollouts: Sequence[Rollout]) -> Group:
    return Group(
        id=GroupId(row["id"]),
        ordinal=Ordinal(row["ordinal"]),
        row=row["row"],
        deadline=VersionStep(row["deadline"]),
        state=GroupState(row["state"]),
        rollouts=tuple(rollouts),
    )


def _rollout(row: sqlite3.Row) -> Rollout:
    return Rollout(
        id=RolloutId(row["id"]),
        group_id=GroupId(row["grp_id"]),
        k=row["k"],
        state=RolloutState(row["state"]),
        n_tokens=row["n_tokens"],
        min_step=row["min_step"],
        max_step=row["max_step"],
        resumes=row["resumes"],
        finish=row["finish"],
        reward=row["reward"],
        parts=None if row["parts"] is None else msgspec.json.decode(row["parts"], type=dict[str, float]),
        text=row["text"],
    )
