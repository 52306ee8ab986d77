"""Rows of the redo log as carriers: how `step`, `step_grp` and `step_rollout` become a Step."""

import sqlite3

import msgspec

from rlhfd.core.types import GroupId, RolloutId, Step, StepId, StepRollout, StepState, VersionId
from rlhfd.errors import StateError
from rlhfd.store.queries import query

_ROLLOUTS = query("step_rollouts")


def step_row(connection: sqlite3.Connection, step_id: StepId) -> sqlite3.Row:
    """The row of a step. Raises StateError for an id that is not there."""
    row = connection.execute("SELECT * FROM step WHERE id = ?", (step_id,)).fetchone()
    if row is None:
        raise StateError(f"no step row {step_id}")
    return row


def fetch_step(connection: sqlite3.Connection, step_id: StepId) -> Step:
    """A step with its groups and rollouts in training order. Raises StateError."""
    return step_of(connection, step_row(connection, step_id))


def step_of(connection: sqlite3.Connection, row: sqlite3.Row) -> Step:
    """The same, from its row."""
    groups = connection.execute("SELECT grp_id FROM step_grp WHERE step_id = ? ORDER BY position", (row["id"],))
    rollouts = connection.execute(_ROLLOUTS, {"step_id": row["id"]})
    return Step(
        id=StepId(row["id"]),
        n=row["n"],
        state=StepState(row["state"]),
        version_in=None if row["version_in"] is None else VersionId(row["version_in"]),
        version_out=None if row["version_out"] is None else VersionId(row["version_out"]),
        seed=row["seed"],
        settings=msgspec.json.decode(row["settings"]),
        numerics=msgspec.json.decode(row["numerics"]),
        fingerprint=None if row["fingerprint"] is None else msgspec.json.decode(row["fingerprint"]),
        groups=tuple(GroupId(group["grp_id"]) for group in groups),
        rollouts=tuple(_use_of(rollout) for rollout in rollouts),
    )


def _use_of(row: sqlite3.Row) -> StepRollout:
    return StepRollout(
        rollout_id=RolloutId(row["rollout_id"]),
        group_id=GroupId(row["grp_id"]),
        advantage=row["advantage"],
        minibatch=row["minibatch"],
        micro_batch=row["micro_batch"],
        masked=bool(row["masked"]),
        skipped=bool(row["skipped"]),
    )
