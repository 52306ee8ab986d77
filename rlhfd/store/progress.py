"""Where a job stands, in one look: what the planner decides on, and what the metrics of a step are made of."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rlhfd.core.metrics import RolloutFacts
from rlhfd.core.types import GroupId, JobId, Ordinal, StepId, VersionStep
from rlhfd.store.db import Database
from rlhfd.store.queries import query

_PROGRESS = query("progress")
_FACTS = query("step_facts")
_SPANS = query("version_spans")
_LABELLED = query("groups_labelled")
_COLLECTED_TO = query("collected_to")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Step numbers. `recorded`: the step to be learned next; `planned`: the newest recorded or applied one.

    `saved`: of the newest valid checkpoint, 0 without one; `published`: newest version that an engine has run, or 0;
    `lost`: newest version that a diverged replay could not make again, or 0.
    """

    applied: int
    recorded: int | None
    planned: int
    saved: int
    published: int
    lost: int


async def progress(db: Database, job_id: JobId) -> Progress:
    """The job's numbers, from one consistent read."""
    row = await db.read(lambda connection: connection.execute(_PROGRESS, {"job_id": job_id}).fetchone())
    return Progress(
        applied=row["applied"],
        recorded=row["recorded"],
        planned=row["planned"],
        saved=row["saved"],
        published=row["published"],
        lost=row["lost"],
    )


async def step_facts(db: Database, step_id: StepId) -> list[RolloutFacts]:
    """Every rollout of the step's groups, unscored ones too, with its tokens by the version that sampled them."""

    def facts(connection: sqlite3.Connection) -> list[RolloutFacts]:
        spans: dict[int, list[tuple[VersionStep, int]]] = {}
        for row in connection.execute(_SPANS, {"step_id": step_id}):
            spans.setdefault(row["rollout_id"], []).append((VersionStep(row["step"]), row["tokens"]))
        return [
            RolloutFacts(
                group=Ordinal(row["ordinal"]),
                reward=row["reward"],
                parts={} if row["parts"] is None else msgspec.json.decode(row["parts"], type=dict[str, float]),
                tokens=tuple(spans.get(row["id"], [])),
                truncated=row["finish"] == "length",
            )
            for row in connection.execute(_FACTS, {"step_id": step_id})
        ]

    return await db.read(facts)


async def dropped_at(db: Database, job_id: JobId, start_version: int) -> int:
    """Groups admitted at this start version or later that were dropped."""
    sql = "SELECT count(*) FROM grp WHERE job_id = ? AND state = 'dropped' AND admitted_step >= ?"
    return await db.read(lambda connection: connection.execute(sql, (job_id, start_version)).fetchone()[0])


async def tokens_reported(db: Database, job_id: JobId) -> int:
    """Sum of `tokens_generated` over the rows of the applied steps: what the next row does not count again."""
    sql = (
        "SELECT coalesce(sum(json_extract(metrics, '$.tokens_generated')), 0) FROM step "
        "WHERE job_id = ? AND state = 'applied'"
    )
    return await db.read(lambda connection: connection.execute(sql, (job_id,)).fetchone()[0])


async def groups_labelled(db: Database, job_id: JobId, versions: Sequence[int]) -> list[GroupId]:
    """Groups that hold a token sampled under one of these version steps (of versions that are not lost), by ordinal."""
    values = {"job_id": job_id, "steps": msgspec.json.encode(list(versions)).decode()}
    rows = await db.read(lambda connection: connection.execute(_LABELLED, values).fetchall())
    return [GroupId(row["id"]) for row in rows]


async def tokens_stored(db: Database, job_id: JobId) -> int:
    """Tokens whose rows are still there."""
    sql = "SELECT coalesce(sum(n_tokens), 0) FROM rollout JOIN grp ON grp.id = grp_id WHERE job_id = ?"
    return await db.read(lambda connection: connection.execute(sql, (job_id,)).fetchone()[0])


async def collected_to(db: Database, job_id: JobId) -> int:
    """The newest applied step of which retention has deleted a rollout; 0 where all are there."""
    return await db.read(lambda connection: connection.execute(_COLLECTED_TO, {"job_id": job_id}).fetchone()[0])


async def set_publish_time(db: Database, job_id: JobId, step: int, seconds: float) -> None:
    """Add the publication's seconds, known only later, to the row of the step that made the version."""
    sql = (
        "UPDATE step SET metrics = json_patch(metrics, json_object('time', json_object('publish', ?))) "
        "WHERE job_id = ? AND n = ? AND state = 'applied' AND metrics IS NOT NULL"
    )

    def update(connection: sqlite3.Connection) -> None:
        connection.execute(sql, (seconds, job_id, step))

    await db.write(update)
