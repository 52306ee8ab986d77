import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files

import pytest

from rlhfd.store import migrations
from rlhfd.store.queries import query

SOURCE = files("rlhfd.store").joinpath("queries.sql").read_text()
NAMES = re.findall(r"^-- name: (\w+)$", SOURCE, re.MULTILINE)

# what may be walked from end to end: small tables, and rollouts where retention keeps them few and the call is rare
WALKED = {
    "abandon_checkpoints": {"checkpoint"},
    "checkpoints": {"checkpoint"},
    "collectable_groups": {"rollout"},
    "dependents": {"job", "dependent"},
    "forgive_attempts": {"job"},
    "groups_labelled": {"chunk"},
    "insert_event": {"daemon"},
    "park_rollouts": {"rollout"},
    "tokens_committed": {"rollout"},
    "valid_checkpoints": {"checkpoint"},
}


@pytest.fixture
def empty() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in migrations.statements(migrations.MIGRATIONS[0]):
            connection.execute(statement)
        yield connection


def test_a_name_is_there_once():
    assert len(NAMES) == len(set(NAMES)) > 50


def test_every_query_is_used():
    code = "".join(path.read_text() for path in files("rlhfd.store").iterdir() if path.name.endswith(".py"))
    assert [name for name in NAMES if f'query("{name}")' not in code] == []


def test_a_query_that_is_not_there_is_told():
    with pytest.raises(KeyError):
        query("nothing")


@pytest.mark.parametrize("name", NAMES)
def test_no_query_walks_a_table_that_grows(empty: sqlite3.Connection, name: str):
    sql = query(name)
    values = dict.fromkeys(re.findall(r"(?<![\w'$.]):(\w+)", sql), "[1]")
    plan = [row[3] for row in empty.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    walked = {step.split()[1] for step in plan if step.startswith("SCAN")} - {"json_each", "CONSTANT"}
    assert walked == WALKED.get(name, set()), plan
