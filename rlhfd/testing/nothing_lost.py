"""assert_nothing_lost: what must hold of the database after any fault, whatever was in flight.

What had been acknowledged before the fault is there, equal, byte for byte; what had not is wholly there or wholly
absent; and every invariant that can be read from the tables holds. Read-only; runs beside a live daemon or after it.

    acked.append(ChunkAck(...))        # when the reply is in hand, not before
    ...kill...
    assert_nothing_lost(path, acked)

Acks travel between processes as lines: `to_line`, `from_line`.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import msgspec


class _Ack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what was acknowledged; ids are those of the tables."""


class JobAck(_Ack, frozen=True):
    """A submit was answered."""

    id: int
    name: str
    spec: dict[str, Any]


class ChunkAck(_Ack, frozen=True):
    """`append_chunk` returned: these bytes, under this version, at this place."""

    group_id: int
    rollout_id: int
    start: int
    version_id: int
    tokens: bytes
    logps: bytes


class ScoreAck(_Ack, frozen=True):
    """`score_rollout` returned."""

    group_id: int
    rollout_id: int
    reward: float


class StepAck(_Ack, frozen=True):
    """`record_step` returned. `groups`: in training order."""

    id: int
    n: int
    groups: list[int]


class VersionAck(_Ack, frozen=True):
    """`apply_step` returned this version; it may have become lost since, but never another step's."""

    id: int
    step: int
    fingerprint: dict[str, Any]


class CheckpointAck(_Ack, frozen=True):
    """`commit` returned; it may have been deleted since, but its row never says another hash."""

    id: int
    manifest_sha: str


Ack: TypeAlias = JobAck | ChunkAck | ScoreAck | StepAck | VersionAck | CheckpointAck


def to_line(ack: Ack) -> bytes:
    """One line of JSON, newline included."""
    return msgspec.json.encode(ack) + b"\n"


def from_line(line: bytes) -> Ack:
    """The ack of a line. Raises msgspec.DecodeError for half a one."""
    return msgspec.json.decode(line, type=Ack)


def assert_nothing_lost(path: Path, acked: Iterable[Ack] = ()) -> None:
    """Raises AssertionError that names every rule broken and every ack lost, with the rows."""
    found = list(violations(path, acked))
    if found:
        raise AssertionError(f"{path}: {len(found)} violations\n" + "\n".join(f"- {line}" for line in found))


def violations(path: Path, acked: Iterable[Ack] = ()) -> Iterator[str]:
    """One sentence for each rule broken and each ack lost."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")  # one snapshot for all of it
        yield from _damage(connection)
        for rule, sql in RULES.items():
            rows = [tuple(row) for row in connection.execute(sql)]
            if rows:
                yield f"{rule}: {rows[:5]}{' …' if len(rows) > 5 else ''}"
        for ack in acked:
            lost = _lost(connection, ack)
            if lost:
                yield f"acknowledged and lost: {lost} ({_brief(ack)})"


def consumption(path: Path, job_id: int) -> dict[int, list[tuple[int, int]]]:
    """Step n -> its live (ordinal, k) in training order: an interrupted run's equals an uninterrupted one's."""
    sql = """
        SELECT n, ordinal, num_generations FROM step JOIN step_grp ON step_id = step.id AND void = 0
        JOIN grp ON grp.id = grp_id WHERE step.job_id = ? AND step.state = 'applied' ORDER BY n, position"""
    consumed: dict[int, list[tuple[int, int]]] = {}
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        for n, ordinal, generations in connection.execute(sql, (job_id,)):
            consumed.setdefault(n, []).extend((ordinal, k) for k in range(generations))
    return consumed


def _damage(connection: sqlite3.Connection) -> Iterator[str]:
    for (line,) in connection.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"integrity_check: {line}"
    for row in connection.execute("PRAGMA foreign_key_check"):
        yield f"foreign_key_check: {tuple(row)}"


RULES: dict[str, str] = {
    "chunks are contiguous from 0 (rollout, start, gap)": """
        SELECT * FROM (SELECT rollout_id, start, start - coalesce(sum(n) OVER (
          PARTITION BY rollout_id ORDER BY start ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS gap
        FROM chunk) WHERE gap <> 0""",
    "a rollout has as many tokens as its chunks (rollout, n_tokens, in chunks)": """
        SELECT rollout.id, n_tokens, coalesce(sum(n), 0) AS stored
        FROM rollout LEFT JOIN chunk ON rollout_id = rollout.id GROUP BY rollout.id HAVING n_tokens <> stored""",
    "a rollout's versions are its chunks' (rollout)": """
        SELECT rollout.id FROM rollout JOIN chunk ON rollout_id = rollout.id
        JOIN policy_version AS v ON v.id = version_id GROUP BY rollout.id
        HAVING min_step <> min(step) OR max_step <> max(step)""",
    "a chunk's version is of its own job (rollout, version)": """
        SELECT rollout_id, version_id FROM chunk JOIN rollout ON rollout.id = rollout_id JOIN grp ON grp.id = grp_id
        JOIN policy_version AS v ON v.id = version_id WHERE v.job_id <> grp.job_id""",
    "a group is used by exactly the live step that its state tells of (group, state, recorded, applied)": """
        SELECT grp.id, grp.state, total(step.state = 'recorded') AS recorded, total(step.state = 'applied') AS applied
        FROM grp LEFT JOIN step_grp ON grp_id = grp.id AND void = 0 LEFT JOIN step ON step.id = step_id GROUP BY grp.id
        HAVING recorded <> (grp.state = 'reserved') OR applied <> (grp.state = 'consumed')""",
    "only void steps have void uses (step, group)": """
        SELECT step_id, grp_id FROM step_grp JOIN step ON step.id = step_id WHERE void <> (state = 'void')""",
    "live steps are 1, 2, 3 … without a gap (job, newest, how many)": """
        SELECT job_id, max(n), count(*) FROM step WHERE state <> 'void' GROUP BY job_id HAVING max(n) <> count(*)""",
    "a job stands at its newest applied step, and recorded steps come after it (job, step)": """
        SELECT job.id, job.step FROM job LEFT JOIN step ON job_id = job.id AND step.state <> 'void' GROUP BY job.id
        HAVING job.step <> coalesce(max(n) FILTER (WHERE step.state = 'applied'), 0)
        OR coalesce(min(n) FILTER (WHERE step.state = 'recorded'), job.step + 1) <> job.step + 1""",
    "live versions are 0, 1, 2 … up to the job's step (job, step, newest, how many)": """
        SELECT job.id, job.step, max(v.step), count(*) FROM job JOIN policy_version AS v ON v.job_id = job.id
        WHERE v.state <> 'lost' GROUP BY job.id HAVING max(v.step) <> job.step OR count(*) <> job.step + 1""",
    "step n leads from version n-1 to version n, its child (step, n)": """
        SELECT step.id, n FROM step JOIN policy_version AS b ON b.id = version_out
        LEFT JOIN policy_version AS a ON a.id = version_in
        WHERE b.step <> n OR a.step IS NOT n - 1 OR b.parent_id IS NOT version_in""",
    "the next step to be learned knows its version (step, n)": """
        SELECT id, n FROM step AS s WHERE state = 'recorded' AND version_in IS NULL
        AND n = (SELECT min(n) FROM step WHERE job_id = s.job_id AND state = 'recorded')""",
    "ordinals are 0, 1, 2 … without a gap (job, next, how many)": """
        SELECT job_id, max(ordinal) + 1, count(*) FROM grp GROUP BY job_id HAVING max(ordinal) + 1 <> count(*)""",
    "a group has all its rollouts, or none once it is consumed or dropped (group, state, how many)": """
        SELECT grp.id, grp.state, count(rollout.id) AS n FROM grp LEFT JOIN rollout ON grp_id = grp.id GROUP BY grp.id
        HAVING n <> num_generations AND NOT (n = 0 AND grp.state IN ('consumed', 'dropped'))""",
    "every rollout of a complete group is scored or failed (group, rollout)": """
        SELECT grp.id, rollout.id FROM grp JOIN rollout ON grp_id = grp.id
        WHERE grp.state IN ('ready', 'reserved', 'consumed') AND rollout.state NOT IN ('scored', 'failed')""",
    "an open group still has a rollout to come (group)": """
        SELECT grp.id FROM grp JOIN rollout ON grp_id = grp.id WHERE grp.state = 'open'
        GROUP BY grp.id HAVING total(rollout.state IN ('scored', 'failed')) = num_generations""",
    "staleness is bounded at consumption (step, rollout, staleness)": """
        SELECT step.id, rollout_id, n - 1 - v.step FROM step JOIN step_rollout ON step_id = step.id
        JOIN (SELECT rollout_id, version_id FROM chunk) USING (rollout_id) JOIN policy_version AS v ON v.id = version_id
        WHERE step.state <> 'void' AND n - 1 - v.step > max_staleness""",
    "a group is trained before its deadline (step, group)": """
        SELECT step.id, grp.id FROM step JOIN step_grp ON step_id = step.id JOIN grp ON grp.id = grp_id
        WHERE step.state <> 'void' AND deadline < n - 1""",
    "rollouts go only once a checkpoint covers their step (group, n)": """
        SELECT grp_id, n FROM step JOIN step_grp ON step_id = step.id AND void = 0
        WHERE state <> 'void' AND NOT EXISTS (SELECT 1 FROM rollout WHERE rollout.grp_id = step_grp.grp_id)
        AND n > coalesce((SELECT max(v.step) FROM checkpoint AS c JOIN policy_version AS v ON v.id = version_id
          WHERE c.job_id = step.job_id AND c.state = 'committed' AND v.state <> 'lost'), 0)""",
    "ids are never used again (table)": """
        SELECT name FROM sqlite_sequence WHERE seq < CASE name
          WHEN 'job' THEN (SELECT max(id) FROM job) WHEN 'event' THEN (SELECT max(id) FROM event)
          WHEN 'policy_version' THEN (SELECT max(id) FROM policy_version) WHEN 'step' THEN (SELECT max(id) FROM step)
          WHEN 'grp' THEN (SELECT max(id) FROM grp) WHEN 'rollout' THEN (SELECT max(id) FROM rollout)
          ELSE 0 END""",
}


def _lost(connection: sqlite3.Connection, ack: Ack) -> str:
    """What of an ack is not there or not equal; empty if all is."""
    match ack:
        case JobAck():
            row = connection.execute("SELECT name, spec FROM job WHERE id = ?", (ack.id,)).fetchone()
            return _differs(row and (row["name"], msgspec.json.decode(row["spec"])), (ack.name, ack.spec))
        case ChunkAck():
            return _lost_chunk(connection, ack)
        case ScoreAck():
            row = connection.execute("SELECT reward FROM rollout WHERE id = ?", (ack.rollout_id,)).fetchone()
            return "" if row is None and _collected(connection, ack) else _differs(row and row["reward"], ack.reward)
        case StepAck():
            sql = "SELECT n, grp_id FROM step JOIN step_grp ON step_id = id WHERE id = ? ORDER BY position"
            rows = [tuple(row) for row in connection.execute(sql, (ack.id,))]
            return _differs(rows, [(ack.n, group_id) for group_id in ack.groups])
        case VersionAck():
            sql = "SELECT step, fingerprint FROM policy_version WHERE id = ?"
            row = connection.execute(sql, (ack.id,)).fetchone()
            found = row and (row["step"], msgspec.json.decode(row["fingerprint"]))
            return _differs(found, (ack.step, ack.fingerprint))
        case CheckpointAck():
            row = connection.execute("SELECT manifest_sha FROM checkpoint WHERE id = ?", (ack.id,)).fetchone()
            return "" if row is None else _differs(row["manifest_sha"], ack.manifest_sha)


def _lost_chunk(connection: sqlite3.Connection, ack: ChunkAck) -> str:
    sql = "SELECT version_id, tok, lp FROM chunk WHERE rollout_id = ? AND start = ?"
    row = connection.execute(sql, (ack.rollout_id, ack.start)).fetchone()
    if row is None and _collected(connection, ack):
        return ""
    return _differs(row and tuple(row), (ack.version_id, ack.tokens, ack.logps))


def _collected(connection: sqlite3.Connection, ack: ChunkAck | ScoreAck) -> bool:
    """Whether retention has deleted the whole group, which RULES checks the right to."""
    sql = "SELECT state, (SELECT count(*) FROM rollout WHERE grp_id = grp.id) FROM grp WHERE id = ?"
    row = connection.execute(sql, (ack.group_id,)).fetchone()
    return row is not None and row[0] in {"consumed", "dropped"} and row[1] == 0


def _differs(found: object, expected: object) -> str:
    if found == expected:
        return ""
    return "the row is gone" if found is None or found == [] else f"found {str(found)[:200]}"


def _brief(ack: Ack) -> str:
    return str(ack)[:200]
