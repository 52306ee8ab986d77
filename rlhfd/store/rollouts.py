"""Rollouts: taken on by an engine, let go of, finished (by their last chunk: chunks.py), scored or failed."""

import math
import sqlite3
from collections.abc import Mapping

from rlhfd.core import lifecycle
from rlhfd.core.types import Epoch, GroupState, JobId, RolloutId, RolloutState
from rlhfd.errors import StateError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.groups import drop
from rlhfd.store.moves import guard, json_text, refused
from rlhfd.store.queries import query

_PARK = query("park_job")
_LEASE = query("lease_rollout")
_SCORE = query("score_rollout")
_PROGRESS = query("group_progress")
_MOVE_GROUP = query("move_group")


async def start_rollout(db: Database, rollout_id: RolloutId, epoch: Epoch) -> None:
    """An engine of this epoch takes the rollout on, from its first token or from where it stopped.

    Guard: compare and set. Raises StateError for one that is being generated or is finished.
    """

    def start(connection: sqlite3.Connection) -> None:
        values = {**guard(RolloutState, "start"), "id": rollout_id, "epoch": epoch}
        if connection.execute(_LEASE, values).rowcount == 0:
            raise refused(connection, RolloutState, rollout_id, "start")

    await db.write(start)


async def release_rollout(db: Database, rollout_id: RolloutId) -> None:
    """Leave it partial: the engine let go of it, its tokens stay. Guard: compare and set. Raises StateError."""

    def release(connection: sqlite3.Connection) -> None:
        values = {**guard(RolloutState, "release"), "id": rollout_id, "epoch": None}
        if connection.execute(_LEASE, values).rowcount == 0:
            raise refused(connection, RolloutState, rollout_id, "release")

    await db.write(release)


async def park(db: Database, job_id: JobId) -> int:
    """Every rollout of a job in generation becomes partial: an attempt begins, and nothing of the one before runs.

    Guard: state; again changes nothing. How many there were.
    """

    def release(connection: sqlite3.Connection) -> int:
        return connection.execute(_PARK, {**guard(RolloutState, "release"), "job_id": job_id}).rowcount

    return await db.write(release)


async def score_rollout(
    db: Database,
    rollout_id: RolloutId,
    parts: Mapping[str, float],
    reward: float,
    text: str,
    *,
    min_scored: int = 2,
) -> GroupState:
    """Store a finite reward; what state its group has now.

    Rule "score", one transaction: with its k-th rollout scored or failed the group becomes ready, or is dropped where
    fewer than `min_scored` are scored. Guard: state; the same reward again changes nothing. Raises StateError.
    """
    if not all(map(math.isfinite, (reward, *parts.values()))):
        raise StateError(f"the reward of rollout {rollout_id} is no finite number: {reward} of {dict(parts)}")
    values = {"reward": float(reward), "parts": json_text(dict(parts)), "text": text}
    return await _settle(db, rollout_id, "score", values, min_scored)


async def fail_rollout(db: Database, rollout_id: RolloutId, error: str, *, min_scored: int = 2) -> GroupState:
    """A reward gave no number: the rollout leaves its group, with an event; the group's state as in `score_rollout`."""
    return await _settle(db, rollout_id, "fail", {"reward": None, "parts": None, "text": error}, min_scored)


async def _settle(
    db: Database, rollout_id: RolloutId, event: str, values: Mapping[str, str | float | None], min_scored: int
) -> GroupState:
    now = db.now_us()

    def settle(connection: sqlite3.Connection) -> GroupState:
        changed = connection.execute(_SCORE, {**values, **guard(RolloutState, event), "id": rollout_id}).rowcount
        if changed == 0 and not _settled_so(connection, rollout_id, event, values["reward"]):
            raise refused(connection, RolloutState, rollout_id, event)
        row = connection.execute(_PROGRESS, {"rollout_id": rollout_id}).fetchone()
        if changed and event == "fail":
            body = {"rollout": rollout_id, "ordinal": row["ordinal"], "error": values["text"]}
            events.insert(connection, row["job_id"], "reward_failed", body, now)
        return _complete(connection, row, min_scored, now)

    return await db.write(settle)


def _settled_so(connection: sqlite3.Connection, rollout_id: RolloutId, event: str, reward: str | float | None) -> bool:
    """Whether the same call was acknowledged before: the state is the event's and the reward is the same."""
    row = connection.execute("SELECT state, reward FROM rollout WHERE id = ?", (rollout_id,)).fetchone()
    return row is not None and (row["state"], row["reward"]) == (lifecycle.target(RolloutState, event), reward)


def _complete(connection: sqlite3.Connection, row: sqlite3.Row, min_scored: int, now: int) -> GroupState:
    state = GroupState(row["state"])
    if state is not GroupState.OPEN or row["settled"] < row["num_generations"]:
        return state
    if row["scored"] < min_scored:
        drop(connection, row["id"], f"only {row['scored']} of {row['num_generations']} rollouts have a reward", now)
        return GroupState.DROPPED
    connection.execute(_MOVE_GROUP, {**guard(GroupState, "complete"), "id": row["id"], "reason": None}).fetchall()
    return GroupState.READY
