"""A small job told step by step through the public functions of the store: what most of these tests start from."""

import struct
from dataclasses import dataclass

from rlhfd.core.types import (
    Epoch,
    Group,
    Job,
    JobId,
    Ordinal,
    Rollout,
    RolloutId,
    Step,
    StepRollout,
    Version,
    VersionStep,
)
from rlhfd.store import chunks, epochs, groups, jobs, rollouts, steps, versions
from rlhfd.store.db import Database

FINGERPRINT = {"losses": [0.25], "grad_norms": [1.0], "skipped": [False], "policy": "aa", "optimizer": "bb"}
NUMERICS = {"torch": "2.13", "threads": "1"}
SETTINGS = {"temperature": 1.0, "learning_rates": [1e-5]}
K = 2  # rollouts a group


def submission(key: str = "key", **changes: object) -> jobs.Submission:
    fields: dict[str, object] = {
        "submit_key": key,
        "name": "story",
        "spec": {"rollout": {"max_staleness": 2}},
        "spec_sha": "5ec",
        "facts": {"model": {"parameters": 3}},
        "max_steps": 10,
    }
    return jobs.Submission(**(fields | changes))  # pyright: ignore[reportArgumentType]


async def begin(db: Database) -> Epoch:
    return await epochs.begin_epoch(db, pid=1, boot_id="boot", version="0.1")


async def submitted(db: Database, key: str = "key") -> Job:
    job, _ = await jobs.submit(db, submission(key))
    return job


def tokens_of(rollout_id: int, start: int, n: int) -> bytes:
    """Tokens that say whose they are and where they belong."""
    return struct.pack(f"<{n}i", *(rollout_id * 1000 + at for at in range(start, start + n)))


def logps_of(start: int, n: int) -> bytes:
    return struct.pack(f"<{n}f", *(-0.5 - at for at in range(start, start + n)))


@dataclass(kw_only=True)
class Story:
    """One job of an open database, and the verbs that move it on."""

    db: Database
    job: Job
    epoch: Epoch

    @classmethod
    async def start(cls, db: Database) -> "Story":
        epoch = await begin(db)
        job = await submitted(db)
        claimed = await jobs.claim(db, job.id, epoch)
        assert claimed is not None
        return cls(db=db, job=claimed, epoch=epoch)

    @property
    def id(self) -> JobId:
        return self.job.id

    async def version(self) -> Version:
        return await versions.latest_trained(self.db, self.id)

    async def admit(self, count: int = 1, *, deadline: int = 2, admitted: int = 0) -> tuple[Group, ...]:
        first = await groups.next_ordinal(self.db, self.id)
        rows = [(Ordinal(n), 7 * n, VersionStep(deadline)) for n in range(first, first + count)]
        return await groups.admit(self.db, self.id, rows, K, VersionStep(admitted))

    async def generate(self, rollout: Rollout, n: int = 3, version: Version | None = None) -> None:
        """n tokens in two chunks, the last of which ends it."""
        await rollouts.start_rollout(self.db, rollout.id, self.epoch)
        await self.append(rollout.id, 0, n - 1, version)
        await self.append(rollout.id, n - 1, 1, version, finish="stop")

    async def append(
        self, rollout_id: RolloutId, start: int, n: int, version: Version | None = None, finish: str | None = None
    ) -> bool:
        version = version or await self.version()
        data = tokens_of(rollout_id, start, n), logps_of(start, n)
        return await chunks.append_chunk(self.db, rollout_id, start, *data, version.id, finish=finish)

    async def ready_group(self, *, deadline: int = 2, version: Version | None = None, admitted: int = 0) -> Group:
        (group,) = await self.admit(deadline=deadline, admitted=admitted)
        for rollout in group.rollouts:
            await self.generate(rollout, version=version)
            await rollouts.score_rollout(self.db, rollout.id, {"exact": float(rollout.k)}, float(rollout.k), "text")
        return await groups.group(self.db, group.id)

    async def new_step(self, *members: Group, n: int | None = None, max_staleness: int = 2) -> steps.NewStep:
        version = await self.version()
        return steps.NewStep(
            n=version.step + 1 if n is None else n,
            version_in=version.id,
            seed=42,
            max_staleness=max_staleness,
            settings=SETTINGS,
            numerics=NUMERICS,
            groups=[group.id for group in members],
            rollouts=[use_of(rollout) for group in members for rollout in group.rollouts if rollout.reward is not None],
        )

    async def record(self, *members: Group) -> Step:
        return await steps.record_step(self.db, self.id, await self.new_step(*members))

    async def apply(self, step: Step) -> Version:
        sample = {step.rollouts[0].rollout_id: {"step": step.n, "completion": "text"}}
        return await steps.apply_step(self.db, step.id, FINGERPRINT, {"loss": 0.5, "time": {}}, sample)

    async def learned_step(self) -> Version:
        """A whole step: a group admitted, generated, scored, recorded, applied."""
        version = await self.version()
        group = await self.ready_group(deadline=version.step + 2, admitted=version.step)
        return await self.apply(await self.record(group))


def use_of(rollout: Rollout) -> StepRollout:
    return StepRollout(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        advantage=0.1 + rollout.k,
        minibatch=0,
        micro_batch=rollout.k,
        masked=False,
        skipped=False,
    )
