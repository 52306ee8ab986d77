"""Steps, the redo log: what a step trains on and with is here before it is learned.

    record ─► recorded ─apply─► applied ─confirm─► applied (a replay has reproduced it)
                  │                │
                  └──────void──────┘─► void, and recorded again over the same groups under a new id (replay.py)

Invariants 3 (consumed once: `one_live_use` in the schema) and 4 (staleness is bounded at consumption: checked here, in
SQL, from the chunks themselves).
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlhfd.core import lifecycle
from rlhfd.core.types import (
    GroupId,
    GroupState,
    JobId,
    RolloutId,
    Step,
    StepId,
    StepRollout,
    StepState,
    Version,
    VersionId,
    VersionState,
)
from rlhfd.errors import StateError
from rlhfd.store import events
from rlhfd.store.db import Database
from rlhfd.store.moves import guard, json_text, refused
from rlhfd.store.queries import query
from rlhfd.store.redo import fetch_step, step_of, step_row
from rlhfd.store.versions import fetch_version, version_of

_INSERT = query("insert_step")
_RESERVE = query("reserve")
_INSERT_ROLLOUT = query("insert_step_rollout")
_UNFAITHFUL = query("unfaithful_rollouts")
_STALE = query("stale_tokens")
_OVERDUE = query("overdue_groups")
_FIRST_RECORDED = query("first_recorded")
_APPLIED_AFTER = query("applied_after")
_APPLY = query("apply_step")
_INSERT_VERSION = query("insert_version")
_MOVE_GROUPS = query("move_step_groups")
_APPLY_TO_JOB = query("apply_to_job")
_UNLOCK_NEXT = query("unlock_next_step")


@dataclass(frozen=True, kw_only=True, slots=True)
class NewStep:
    """What `record_step` writes. `groups` and `rollouts` in training order: ordinal, then k.

    `max_staleness`: the bound K that held when the oldest of these groups was admitted. `settings`, `numerics`: as in
    wire.StepSettings and wire.Loaded.numerics, plain data.
    """

    n: int
    version_in: VersionId
    seed: int
    max_staleness: int
    settings: Mapping[str, Any]
    numerics: Mapping[str, str]
    groups: Sequence[GroupId]
    rollouts: Sequence[StepRollout]


async def record_step(db: Database, job_id: JobId, new: NewStep) -> Step:
    """Write the next step down before it is learned.

    Rule "plan", one transaction: step, its groups reserved, its rollouts, seed and settings in force. Guard: unique
    live use of a group, one live step n; the same step again gives the one that is there. Raises StateError, and
    changes nothing, where a group is not ready, the rollouts are not exactly the scored ones of the groups,
    `version_in` is not version n-1, a token is staler than `max_staleness`, or a group is past its deadline.
    """
    now = db.now_us()
    return await db.write(lambda connection: _record(connection, job_id, new, now), urgent=True)


def _record(connection: sqlite3.Connection, job_id: JobId, new: NewStep, now: int) -> Step:
    sql = "SELECT * FROM step WHERE job_id = ? AND n = ? AND state <> 'void'"
    known = connection.execute(sql, (job_id, new.n)).fetchone()
    if known is not None:
        return _same(step_of(connection, known), new)
    _check_start(connection, job_id, new)
    step_id = _insert_step(connection, job_id, new, now)
    _reserve(connection, job_id, step_id, new.groups)
    connection.executemany(_INSERT_ROLLOUT, [_use(step_id, rollout) for rollout in new.rollouts])
    _check_rollouts(connection, step_id, new)
    _check_staleness(connection, step_id, new)
    return fetch_step(connection, step_id)


def _same(step: Step, new: NewStep) -> Step:
    if (step.version_in, step.groups, step.seed) != (new.version_in, tuple(new.groups), new.seed):
        raise StateError(f"step {new.n} is recorded already, as step row {step.id}, over other groups")
    return step


def _check_start(connection: sqlite3.Connection, job_id: JobId, new: NewStep) -> None:
    sql = "SELECT step, state FROM policy_version WHERE id = ? AND job_id = ?"
    row = connection.execute(sql, (new.version_in, job_id)).fetchone()
    if row is None or row["step"] != new.n - 1 or row["state"] == VersionState.LOST:
        found = "no version of this job" if row is None else f"{row['state']}, of step {row['step']}"
        raise StateError(f"step {new.n} can't start from version {new.version_in}: it is {found}")


def _insert_step(connection: sqlite3.Connection, job_id: JobId, new: NewStep, now: int) -> StepId:
    values = {
        "job_id": job_id,
        "n": new.n,
        "version_in": new.version_in,
        "state": lifecycle.INITIAL[StepState],
        "seed": new.seed,
        "max_staleness": new.max_staleness,
        "settings": json_text(dict(new.settings)),
        "numerics": json_text(dict(new.numerics)),
        "now": now,
    }
    return StepId(connection.execute(_INSERT, values).fetchone()["id"])


def _reserve(connection: sqlite3.Connection, job_id: JobId, step_id: StepId, groups: Sequence[GroupId]) -> None:
    for position, group_id in enumerate(groups):
        values = {**guard(GroupState, "reserve"), "id": group_id, "job_id": job_id}
        if connection.execute(_RESERVE, values).rowcount == 0:
            raise refused(connection, GroupState, group_id, "reserve")
        sql = "INSERT INTO step_grp (step_id, grp_id, position) VALUES (?, ?, ?)"
        connection.execute(sql, (step_id, group_id, position))


def _use(step_id: StepId, rollout: StepRollout) -> dict[str, int | float]:
    return {
        "step_id": step_id,
        "rollout_id": rollout.rollout_id,
        "advantage": float(rollout.advantage),
        "minibatch": rollout.minibatch,
        "micro_batch": rollout.micro_batch,
        "masked": int(rollout.masked),
        "skipped": int(rollout.skipped),
    }


def _check_rollouts(connection: sqlite3.Connection, step_id: StepId, new: NewStep) -> None:
    wrong = [str(row["id"]) for row in connection.execute(_UNFAITHFUL, {"step_id": step_id})]
    if wrong:
        raise StateError(f"step {new.n} must name exactly the scored rollouts of its groups: see {', '.join(wrong)}")


def _check_staleness(connection: sqlite3.Connection, step_id: StepId, new: NewStep) -> None:
    """Invariant 4, the line that is the guarantee: V - step(version) <= max_staleness for every token."""
    stale = connection.execute(_STALE, {"step_id": step_id}).fetchone()
    if stale is not None:
        raise StateError(
            f"step {new.n} would train rollout {stale['rollout_id']} on tokens that are {stale['staleness']} versions "
            f"old, over max_staleness = {stale['max_staleness']}"
        )
    overdue = connection.execute(_OVERDUE, {"step_id": step_id}).fetchone()
    if overdue is not None:
        raise StateError(f"step {new.n} takes ordinal {overdue['ordinal']} after its deadline {overdue['deadline']}")


async def recorded(db: Database, job_id: JobId) -> Step | None:
    """The step to be learned next: the lowest recorded one. After a divergence others may wait behind it."""

    def first(connection: sqlite3.Connection) -> Step | None:
        row = connection.execute(_FIRST_RECORDED, {"job_id": job_id}).fetchone()
        return None if row is None else step_of(connection, row)

    return await db.read(first)


async def applied_after(db: Database, job_id: JobId, n: int) -> tuple[Step, ...]:
    """Applied steps with a higher number, in order: what a replay from the checkpoint of step n learns again."""

    def steps(connection: sqlite3.Connection) -> tuple[Step, ...]:
        rows = connection.execute(_APPLIED_AFTER, {"job_id": job_id, "n": n}).fetchall()
        return tuple(step_of(connection, row) for row in rows)

    return await db.read(steps)


async def apply_step(
    db: Database,
    step_id: StepId,
    fingerprint: Mapping[str, Any],
    metrics: Mapping[str, Any],
    samples: Mapping[RolloutId, Mapping[str, Any]],
) -> Version:
    """The version that the learned step has made. `samples`: one object of `rlhfd samples` for each rollout shown.

    Rule "apply", one transaction: step applied + fingerprint, new version, groups consumed, the job's step, samples.
    Guard: the expected version_in is the job's newest version; the same fingerprint again gives the version that was
    made. Raises StateError.
    """
    now = db.now_us()

    def apply(connection: sqlite3.Connection) -> Version:
        row = step_row(connection, step_id)
        if row["state"] == StepState.APPLIED and msgspec.json.decode(row["fingerprint"]) == fingerprint:
            return fetch_version(connection, row["version_out"])
        if row["state"] != StepState.RECORDED or row["version_in"] is None:
            raise refused(connection, StepState, step_id, "apply")
        version = _new_version(connection, row, fingerprint, now)
        values = {**guard(StepState, "apply"), "id": step_id, "version_out": version.id, "now": now}
        values |= {"fingerprint": json_text(dict(fingerprint)), "metrics": json_text(dict(metrics))}
        if connection.execute(_APPLY, values).rowcount == 0:
            raise refused(connection, StepState, step_id, "apply")
        _consume(connection, row, version.id, now)
        connection.executemany(
            "INSERT INTO sample (step_id, rollout_id, body) VALUES (?, ?, ?)",
            [(step_id, rollout_id, json_text(dict(body))) for rollout_id, body in samples.items()],
        )
        events.insert(connection, row["job_id"], "step", {"step": row["n"]}, now)
        return version

    return await db.write(apply, urgent=True)


def _new_version(
    connection: sqlite3.Connection, step: sqlite3.Row, fingerprint: Mapping[str, Any], now: int
) -> Version:
    values = {
        "job_id": step["job_id"],
        "parent_id": step["version_in"],
        "step": step["n"],
        "state": lifecycle.INITIAL[VersionState],
        "fingerprint": json_text(dict(fingerprint)),
        "now": now,
    }
    return version_of(connection.execute(_INSERT_VERSION, values).fetchone())


def _consume(connection: sqlite3.Connection, step: sqlite3.Row, version_id: VersionId, now: int) -> None:
    connection.execute(_MOVE_GROUPS, {**guard(GroupState, "consume"), "step_id": step["id"]})
    values = {"job_id": step["job_id"], "n": step["n"], "version_out": version_id, "now": now}
    connection.execute(_APPLY_TO_JOB, values)
    connection.execute(_UNLOCK_NEXT, values)
