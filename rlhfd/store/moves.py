"""Guarded moves: how the table of core/lifecycle.py becomes SQL.

`guard` gives an UPDATE the states it may start from and the one it leads to; where its row count is 0, `refused` says
why in one sentence. So no statement of the store can make a transition that the table does not have.
"""

import sqlite3
from enum import StrEnum
from functools import cache

import msgspec

from rlhfd.core import lifecycle
from rlhfd.core.types import CheckpointState, GroupState, JobState, RolloutState, StepState, VersionState
from rlhfd.errors import RlhfdError, StateError, UnknownJobError, UsageError

_TABLES: dict[type[StrEnum], str] = {
    JobState: "job",
    GroupState: "grp",
    RolloutState: "rollout",
    StepState: "step",
    VersionState: "policy_version",
    CheckpointState: "checkpoint",
}


def guard(noun: type[StrEnum], event: str) -> dict[str, str]:
    """The parameters :to and :sources (a JSON list) of an update that makes `event` happen."""
    to, sources = _guard(noun, event)
    return {"to": to, "sources": sources}


@cache
def _guard(noun: type[StrEnum], event: str) -> tuple[str, str]:
    return lifecycle.target(noun, event), json_text(list(lifecycle.sources(noun, event)))


def refused(connection: sqlite3.Connection, noun: type[StrEnum], row_id: int, event: str) -> RlhfdError:
    """The error for a guarded update that met no row: there is none, its state forbids it, or another guard does.

    UsageError for a job, whose state its owner knows; StateError for the rest, where it is a bug that must stop.
    """
    name = lifecycle.noun_name(noun)
    found = connection.execute(f"SELECT state FROM {_TABLES[noun]} WHERE id = ?", (row_id,)).fetchone()  # noqa: S608
    if found is None:
        return UnknownJobError(f"no job has the id {row_id}") if noun is JobState else StateError(f"no {name} {row_id}")
    state = noun(found[0])
    if state in lifecycle.sources(noun, event):
        sentence = f"{name} {row_id} can't {event.replace('_', ' ')} now, though it is {state}: a newer row forbids it"
    else:
        sentence = f"{name} {row_id}: {lifecycle.refusal(state, event)}"
    return (UsageError if noun is JobState else StateError)(sentence)


def json_text(value: object) -> str:
    """JSON for a TEXT column; a NaN or an infinity becomes null, floats round-trip exactly."""
    return msgspec.json.encode(value).decode()
