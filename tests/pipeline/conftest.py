from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlhfd.store.db import Database
from tests.pipeline.workshop import Workshop


@pytest.fixture
async def db(tmp_path: Path) -> AsyncIterator[Database]:
    async with await Database.open(tmp_path / "rlhfd.db", window=0.0005) as opened:
        yield opened


@pytest.fixture
async def shop(db: Database, tmp_path: Path) -> AsyncIterator[Workshop]:
    opened = await Workshop.open(db, tmp_path)
    yield opened
    opened.context.snapshot.close()
