"""The proof has to bite: each rule, broken by hand, is told; each ack, taken away, is missed."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rlhfd.store import checkpoints, groups, rollouts, steps
from rlhfd.store.db import Database
from rlhfd.testing.nothing_lost import (
    RULES,
    Ack,
    CheckpointAck,
    ChunkAck,
    JobAck,
    ScoreAck,
    StepAck,
    VersionAck,
    assert_nothing_lost,
    consumption,
    from_line,
    to_line,
    violations,
)
from tests.store.story import FINGERPRINT, Story, logps_of, tokens_of

ACKS: list[Ack] = [
    JobAck(id=1, name="story", spec={"rollout": {"max_staleness": 2}}),
    ChunkAck(group_id=1, rollout_id=1, start=0, version_id=1, tokens=tokens_of(1, 0, 2), logps=logps_of(0, 2)),
    ScoreAck(group_id=1, rollout_id=2, reward=1.0),
    StepAck(id=1, n=1, groups=[1]),
    VersionAck(id=2, step=1, fingerprint=FINGERPRINT),
    CheckpointAck(id=1, manifest_sha="sha"),
]


async def tell(path: Path) -> None:
    """Two applied steps, a recorded one, a ready group, an open one."""
    async with await Database.open(path, window=0.0005) as db:
        story = await Story.start(db)
        version = await story.learned_step()
        row = await checkpoints.begin(db, story.id, version.id, "/c/1")
        await checkpoints.commit(db, row.id, "sha", 1)
        await story.learned_step()
        await story.record(await story.ready_group(deadline=4, admitted=2))
        await story.ready_group(deadline=4, admitted=2)
        (going,) = await story.admit(deadline=4, admitted=2)
        await rollouts.start_rollout(db, going.rollouts[0].id, story.epoch)
        await story.append(going.rollouts[0].id, 0, 4)


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("told") / "rlhfd.db"
    asyncio.run(tell(path))
    return path


@pytest.fixture
def told(telling: Path, path: Path) -> Path:
    shutil.copy(telling, path)
    return path


def breach(path: Path, *statements: str) -> list[str]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)
    return list(violations(path, ACKS))


def test_a_story_told_well_breaks_nothing(told: Path):
    assert_nothing_lost(told, ACKS)


# one breach for each rule, by a word of its name
BREACHES = {
    "chunks are contiguous": "UPDATE chunk SET start = start + 1 WHERE rollout_id = 9 AND start = 0",
    "as many tokens": "UPDATE rollout SET n_tokens = n_tokens + 1 WHERE id = 9",
    "a rollout's versions": "UPDATE rollout SET max_step = 7 WHERE id = 9",
    "of its own job": "UPDATE policy_version SET job_id = 2 WHERE id = 3",
    "exactly the live step": "UPDATE grp SET state = 'ready' WHERE id = 1",
    "only void steps": "UPDATE step_grp SET void = 1 WHERE step_id = 1",
    "live steps are": "UPDATE step SET n = 9 WHERE id = 3",
    "a job stands": "UPDATE job SET step = 1",
    "live versions are": "UPDATE policy_version SET state = 'lost' WHERE step = 1",
    "leads from version": "UPDATE policy_version SET parent_id = 3 WHERE id = 2",
    "knows its version": "UPDATE step SET version_in = NULL WHERE id = 3",
    "ordinals are": "UPDATE grp SET ordinal = 9 WHERE id = 5",
    "all its rollouts": "DELETE FROM rollout WHERE id = 10",
    "of a complete group": "UPDATE rollout SET state = 'finished', reward = NULL WHERE id = 7",
    "an open group": "UPDATE grp SET state = 'open' WHERE id = 4",
    "staleness is bounded": "UPDATE chunk SET version_id = 1 WHERE rollout_id = 5",
    "before its deadline": "UPDATE grp SET deadline = 0 WHERE id = 3",
    "go only once": "DELETE FROM rollout WHERE grp_id = 2",
    "never used again": "UPDATE sqlite_sequence SET seq = 1 WHERE name = 'policy_version'",
}


def test_every_rule_is_tried():
    assert len(BREACHES) == len(RULES)
    assert all(any(part in rule for part in BREACHES) for rule in RULES)


@pytest.mark.parametrize("rule", BREACHES)
def test_a_breach_is_told(told: Path, rule: str):
    if rule == "staleness is bounded":
        breach(told, "UPDATE step SET max_staleness = 1 WHERE id = 3")
    assert any(rule in line for line in breach(told, BREACHES[rule]))


@pytest.mark.parametrize(
    "theft",
    [
        "UPDATE job SET spec = '{}' WHERE id = 1",
        "UPDATE chunk SET lp = zeroblob(8) WHERE rollout_id = 1 AND start = 0",
        "DELETE FROM chunk WHERE rollout_id = 1 AND start = 0",
        "UPDATE rollout SET reward = 0.5 WHERE id = 2",
        "UPDATE step_grp SET grp_id = 2 WHERE step_id = 1",
        "UPDATE policy_version SET fingerprint = '{}' WHERE id = 2",
        "UPDATE checkpoint SET manifest_sha = 'other' WHERE id = 1",
    ],
)
def test_an_ack_that_is_lost_is_missed(told: Path, theft: str):
    drop = ["DROP INDEX one_live_use"] if "step_grp" in theft else []
    assert sum("acknowledged and lost" in line for line in breach(told, *drop, theft)) == 1


def test_a_reference_to_nothing_is_told(told: Path):
    assert any("foreign_key_check" in line for line in breach(told, "UPDATE job SET after_id = 99"))


def test_the_error_names_everything_that_is_wrong(told: Path):
    breach(told, BREACHES["a job stands"], BREACHES["as many tokens"])
    with pytest.raises(AssertionError, match=r"(?s)3 violations.*as many tokens.*a job stands"):
        assert_nothing_lost(told, ACKS)


async def test_what_retention_deleted_is_not_lost(told: Path):
    async with await Database.open(told) as db:
        assert await checkpoints.collect_rollouts(db, 1, 1) == 1
    assert_nothing_lost(told, ACKS)


async def test_what_is_consumed_can_be_compared(told: Path):
    assert consumption(told, 1) == {1: [(0, 0), (0, 1)], 2: [(1, 0), (1, 1)]}
    async with await Database.open(told) as db:
        step = await steps.recorded(db, 1)
        assert step is not None
        await steps.apply_step(db, step.id, FINGERPRINT, {}, {})
        assert [g.ordinal for g in await groups.live_groups(db, 1)] == [3, 4]
    assert consumption(told, 1)[3] == [(2, 0), (2, 1)]


@pytest.mark.parametrize("ack", ACKS, ids=lambda ack: type(ack).__name__)
def test_an_ack_travels_as_a_line(ack: Ack):
    line = to_line(ack)
    assert line.count(b"\n") == 1
    assert from_line(line) == ack
