"""kill -9 at random places: what was acknowledged is there, and the work goes on from the tables."""

import asyncio
import random
import signal
import sys
from pathlib import Path

from rlhfd.store import progress
from rlhfd.store.db import Database
from rlhfd.testing.nothing_lost import Ack, CheckpointAck, ChunkAck, VersionAck, assert_nothing_lost, from_line

ROOT = Path(__file__).parents[2]
ROUNDS = 6


async def killed_after(path: Path, lines: int) -> list[Ack]:
    """What a process acknowledged until it was killed, at its `lines`-th line or a little later."""
    command = (sys.executable, "-m", "tests.store.toil", str(path))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    told = [await asyncio.wait_for(process.stdout.readline(), 60) for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    told += (await process.stdout.read()).splitlines(keepends=True)
    assert await process.wait() == -signal.SIGKILL
    return [from_line(line) for line in told if line.endswith(b"\n")]


async def test_what_was_acknowledged_survives_every_kill(path: Path):
    rng = random.Random(7)
    acked: list[Ack] = []
    for _ in range(ROUNDS):
        acked += await killed_after(path, rng.randint(1, 120))
        assert_nothing_lost(path, acked)
    assert {ChunkAck, VersionAck, CheckpointAck} <= {type(ack) for ack in acked}
    steps = [ack.step for ack in acked if isinstance(ack, VersionAck)]
    assert steps == sorted(set(steps)), "a step was learned twice"
    async with await Database.open(path) as db:
        assert (await progress.progress(db, 1)).applied >= steps[-1]
    assert_nothing_lost(path, acked)
