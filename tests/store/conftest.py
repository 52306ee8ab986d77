from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlhfd.store.db import Database
from rlhfd.testing.nothing_lost import assert_nothing_lost
from tests.store.story import Story

WINDOW = 0.0005  # seconds: tests make one transaction after the other


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rlhfd.db"


@pytest.fixture
async def db(path: Path) -> AsyncIterator[Database]:
    async with await Database.open(path, window=WINDOW) as opened:
        yield opened
    assert_nothing_lost(path)  # whatever the test did, the invariants hold


@pytest.fixture
async def story(db: Database) -> Story:
    return await Story.start(db)
