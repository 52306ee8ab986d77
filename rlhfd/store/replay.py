"""After a replay: it has reproduced a step, or it has not.

Decision: when a replay diverges at step n, all steps from n on are recorded again at once, in their order, so that the
groups are never free in between. Only the first of them knows the version it starts from; the `version_in` of those
behind it stays None until the step before is applied.
"""

import sqlite3
from collections.abc import Mapping
from typing import Any

from rlhfd.core import lifecycle
from rlhfd.core.types import GroupState, JobId, StepId, StepState, VersionState
from rlhfd.errors import StateError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.moves import guard, json_text, refused
from rlhfd.store.queries import query
from rlhfd.store.redo import step_row

_INSERT = query("insert_step")
_MOVE_GROUPS = query("move_step_groups")
_LIVE_FROM = query("live_steps_from")
_COPY_GROUPS = query("copy_step_groups")
_COPY_ROLLOUTS = query("copy_step_rollouts")


async def confirm_replay(db: Database, step_id: StepId) -> None:
    """A replay has reproduced the fingerprint: an event, nothing else. Guard: state. Raises StateError."""
    now = db.now_us()

    def confirm(connection: sqlite3.Connection) -> None:
        row = step_row(connection, step_id)
        if row["state"] not in lifecycle.sources(StepState, "confirm"):
            raise refused(connection, StepState, step_id, "confirm")
        events.insert(connection, row["job_id"], "replayed", {"step": row["n"]}, now)

    await db.write(confirm, urgent=True)


async def void_from(
    db: Database, job_id: JobId, n: int, numerics: Mapping[str, str], detail: Mapping[str, Any]
) -> tuple[StepId, ...]:
    """A replay diverged at step n: the ids of steps n, n+1 … recorded again, over the same groups in their order.

    `numerics`: of the learner that will learn them now. One transaction: steps >= n void, their uses void, their
    versions lost, their groups reserved again, the job back at step n-1, the event `replay_diverged` with `detail`.
    Guard: state; a step n that is not applied has nothing to diverge from, so a second call raises StateError.
    """
    now = db.now_us()

    def void(connection: sqlite3.Connection) -> tuple[StepId, ...]:
        rows = connection.execute(_LIVE_FROM, {"job_id": job_id, "n": n}).fetchall()
        if not rows or rows[0]["n"] != n or rows[0]["state"] != StepState.APPLIED:
            raise StateError(f"step {n} of job {job_id} is not applied: no replay of it can diverge")
        for row in rows:
            _void(connection, row)
        again = tuple(_record_again(connection, row, numerics, now, first=row["n"] == n) for row in rows)
        sql = "UPDATE job SET step = ?, updated_us = ? WHERE id = ?"
        connection.execute(sql, (n - 1, now, job_id))
        events.insert(connection, job_id, "replay_diverged", {"step": n, "steps": len(rows), **detail}, now)
        return again

    return await db.write(void, urgent=True)


def _void(connection: sqlite3.Connection, step: sqlite3.Row) -> None:
    to = lifecycle.move(StepState(step["state"]), "void")
    connection.execute("UPDATE step SET state = ? WHERE id = ?", (to, step["id"]))
    connection.execute("UPDATE step_grp SET void = 1 WHERE step_id = ?", (step["id"],))
    connection.execute(_MOVE_GROUPS, {**guard(GroupState, "take_back"), "step_id": step["id"]})
    if step["version_out"] is not None:
        sql = "UPDATE policy_version SET state = ? WHERE id = ?"
        connection.execute(sql, (lifecycle.target(VersionState, "lose"), step["version_out"]))


def _record_again(
    connection: sqlite3.Connection, step: sqlite3.Row, numerics: Mapping[str, str], now: int, *, first: bool
) -> StepId:
    copied = {name: step[name] for name in ("job_id", "n", "seed", "max_staleness", "settings")}
    values = {**copied, "state": lifecycle.INITIAL[StepState], "numerics": json_text(dict(numerics)), "now": now}
    version_in = step["version_in"] if first else None
    step_id = connection.execute(_INSERT, {**values, "version_in": version_in}).fetchone()["id"]
    connection.execute(_COPY_GROUPS, {"new": step_id, "old": step["id"]})
    connection.execute(_COPY_ROLLOUTS, {"new": step_id, "old": step["id"]})
    return StepId(step_id)
