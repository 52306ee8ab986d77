"""How long a row waits for its COMMIT under load, and what that costs.

    python -m tests.bench.store_acks DIRECTORY [producers] [tokens a second] [seconds]

DIRECTORY lies on the disk to be measured. Every producer appends rows of 64 tokens to a rollout of its own.
"""

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from rlhfd.core.types import Rollout, Version
from rlhfd.store import chunks, rollouts
from rlhfd.store.db import Database
from tests.store.story import K, Story, logps_of, tokens_of

ROW = 64
TOKENS, LOGPS = tokens_of(1, 0, ROW), logps_of(0, ROW)


async def produce(story: Story, rollout: Rollout, version: Version, period: float, end: float) -> list[float]:
    """Seconds from call to acknowledgement, one a row."""
    waits: list[float] = []
    due = time.monotonic() + random.random() * period
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        begun = time.perf_counter()
        await chunks.append_chunk(story.db, rollout.id, len(waits) * ROW, TOKENS, LOGPS, version.id)
        waits.append(time.perf_counter() - begun)
        due += period
    return waits


async def measure(directory: Path, producers: int, rate: float, seconds: float) -> str:
    async with await Database.open(directory / "rlhfd.db") as db:
        story = await Story.start(db)
        members = [rollout for group in await story.admit(producers // K) for rollout in group.rollouts]
        await asyncio.gather(*(rollouts.start_rollout(db, rollout.id, story.epoch) for rollout in members))
        version = await story.version()
        period, end, cpu = ROW * producers / rate, time.monotonic() + seconds, time.process_time()
        found = await asyncio.gather(*(produce(story, r, version, period, end) for r in members))
        cpu = (time.process_time() - cpu) / seconds
    waits = sorted(wait for each in found for wait in each)
    p50, p99 = (1000 * waits[int(share * len(waits))] for share in (0.5, 0.99))
    tokens = len(waits) * ROW / seconds
    return f"{producers} producers, {tokens:.0f} tokens/s: ack p50 {p50:.1f} ms, p99 {p99:.1f} ms, {cpu:.1%} of a core"


def main() -> None:
    producers, rate, seconds = (float(text) for text in (*sys.argv[2:], "512", "20000", "10")[:3])
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
        print(asyncio.run(measure(Path(directory), int(producers), rate, seconds)))


if __name__ == "__main__":
    main()
