from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlhfd.store.db import Database
from tests.store.story import Story


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rlhfd.db"


@pytest.fixture
async def db(path: Path) -> AsyncIterator[Database]:
    async with await Database.open(path) as opened:
        yield opened


@pytest.fixture
async def story(db: Database) -> Story:
    return await Story.start(db)
