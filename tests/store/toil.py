"""A process that works on the one job of a store until it is killed, and tells of everything acknowledged.

    python -m tests.store.toil PATH        acks as lines on stdout, each written after its reply

It starts from the tables, whatever an earlier one has left: what is in flight, complete, recorded, being saved.
"""

import asyncio
import os
import sys
from pathlib import Path

from rlhfd.core.types import Group, GroupState, Rollout, RolloutState, Step
from rlhfd.store import checkpoints, chunks, groups, jobs, rollouts, steps, versions
from rlhfd.store.db import Database
from rlhfd.testing.nothing_lost import Ack, CheckpointAck, ChunkAck, JobAck, ScoreAck, StepAck, VersionAck, to_line
from tests.store.story import FINGERPRINT, Story, begin, logps_of, submitted, tokens_of

LENGTH, ROW = 12, 4  # tokens of a rollout, of a chunk
LIVE = 3  # groups that max_staleness = 2 allows at one group a step
KEEP = 2  # checkpoints


def tell(ack: Ack) -> None:
    os.write(sys.stdout.fileno(), to_line(ack))


async def toil(path: Path) -> None:
    async with await Database.open(path, window=0.001) as db:
        epoch = await begin(db)
        job = await submitted(db)
        tell(JobAck(id=job.id, name=job.name, spec=job.spec))
        claimed = await jobs.claim(db, job.id, epoch)
        assert claimed is not None
        story = Story(db=db, job=claimed, epoch=epoch)
        while True:
            await one_round(story)


async def one_round(story: Story) -> None:
    step = await steps.recorded(story.db, story.id)
    if step is not None:
        await learn(story, step)
    live = await groups.live_groups(story.db, story.id)
    version = await story.version()
    if len(live) < LIVE:
        await story.admit(LIVE - len(live), deadline=version.step + LIVE - 1, admitted=version.step)
    await asyncio.gather(*(carry_on(story, group, rollout) for group in live for rollout in group.rollouts))
    ready = [group for group in await groups.live_groups(story.db, story.id) if group.state is GroupState.READY]
    if ready:
        step = await story.record(ready[0])
        tell(StepAck(id=step.id, n=step.n, groups=list(step.groups)))


async def carry_on(story: Story, group: Group, rollout: Rollout) -> None:
    if rollout.state in {RolloutState.PENDING, RolloutState.PARTIAL}:
        version = await story.version()
        await rollouts.start_rollout(story.db, rollout.id, story.epoch)
        for start in range(rollout.n_tokens, LENGTH, ROW):
            n = min(ROW, LENGTH - start)
            tokens, logps = tokens_of(rollout.id, start, n), logps_of(start, n)
            finish = "length" if start + n == LENGTH else None
            await chunks.append_chunk(story.db, rollout.id, start, tokens, logps, version.id, finish=finish)
            place = {"group_id": group.id, "rollout_id": rollout.id, "start": start}
            tell(ChunkAck(**place, version_id=version.id, tokens=tokens, logps=logps))
    elif rollout.state is not RolloutState.FINISHED:
        return
    reward = rollout.k / 3
    await rollouts.score_rollout(story.db, rollout.id, {"exact": reward}, reward, "text")
    tell(ScoreAck(group_id=group.id, rollout_id=rollout.id, reward=reward))


async def learn(story: Story, step: Step) -> None:
    version = await story.apply(step)
    tell(VersionAck(id=version.id, step=version.step, fingerprint=FINGERPRINT))
    await versions.publish(story.db, version.id)
    for old in await checkpoints.prune(story.db, story.id, KEEP):
        await checkpoints.forget(story.db, old.id)
    row = await checkpoints.begin(story.db, story.id, version.id, f"/c/{version.id}")
    await checkpoints.commit(story.db, row.id, f"sha{version.id}", 1)
    tell(CheckpointAck(id=row.id, manifest_sha=f"sha{version.id}"))
    await checkpoints.collect_rollouts(story.db, story.id, KEEP)


if __name__ == "__main__":
    asyncio.run(toil(Path(sys.argv[1])))
