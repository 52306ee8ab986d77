"""Load, replay, learn and save against a scripted learner process, over real tables."""

import asyncio
from array import array
from pathlib import Path

import msgspec
import pytest

from rlhfd.core import wire
from rlhfd.core.ledger import draft
from rlhfd.core.types import CheckpointState, Step, StepState, VersionState
from rlhfd.errors import BadCheckpointError, EngineDiedError, StateError
from rlhfd.pipeline.learn import Learner
from rlhfd.store import checkpoints, chunks, events, groups, metrics, progress, rollouts, steps, versions
from tests.pipeline.workshop import EOS, Workshop

NUMERICS = {"device": "cpu", "torch": "2.13"}


class Process:
    """Stands for the learner process: a step's checksum is its number, unless `drift` is added to it."""

    def __init__(self, *, drift: str = "", bad: frozenset[str] = frozenset()) -> None:
        self.calls: list[str] = []
        self.step = 0
        self.drift, self.bad = drift, bad
        self.dead = False

    def _told(self, what: str) -> None:
        if self.dead:
            raise EngineDiedError("the child closed its channel")
        self.calls.append(what)

    async def load(self, frame: wire.Load) -> wire.Loaded:
        self._told("load")
        if frame.checkpoint_dir in self.bad:
            raise BadCheckpointError("damaged")
        self.step = 0
        if frame.checkpoint_dir is not None:
            self.step = int((Path(frame.checkpoint_dir) / "step").read_text())
        return wire.Loaded(step=self.step, parameters=1, trainable=1, numerics=NUMERICS)

    async def learn(self, frame: wire.Learn, members) -> wire.Learned:
        self._told(f"learn {frame.step}")
        assert frame.version_in == self.step
        assert all(group.rollouts for group in members), "nothing to learn from"
        self.step = frame.step
        print_ = wire.Fingerprint(
            losses=[0.5], grad_norms=[1.0], skipped=[False], policy=f"{frame.step}{self.drift}", optimizer="o"
        )
        return wire.Learned(step=frame.step, fingerprint=print_, metrics={"loss": 0.5}, times={"learn": 1.0}, traces=[])

    async def publish(self, frame: wire.Publish) -> wire.Published:
        self._told("probe" if frame.noise_seed is not None else f"publish {self.step}")
        Path(frame.dir).mkdir(exist_ok=True)
        canary = [array("f", [0.0, float(self.step)]).tobytes()]
        return wire.Published(step=self.step, changed=1.0, nbytes=1, canary=canary)

    async def checkpoint(self, frame: wire.Checkpoint) -> wire.Checkpointed:
        self._told(f"checkpoint {self.step}")
        directory = Path(frame.dir)
        directory.mkdir(parents=True)
        (directory / "step").write_text(str(self.step))
        return wire.Checkpointed(manifest_sha=f"sha {self.step} {frame.epoch}", nbytes=1)


async def record(shop: Workshop) -> Step:
    """Two groups generated, scored and written down as the next step."""
    context, stands = shop.context, await progress.progress(shop.db, shop.job.id)
    version = await versions.latest_trained(shop.db, shop.job.id)
    admitted = await shop.admit(2)
    for group in admitted:
        for rollout in group.rollouts:
            await rollouts.start_rollout(shop.db, rollout.id, context.epoch)
            tokens, logps = array("i", [5, EOS]).tobytes(), array("f", [-0.5, -0.25]).tobytes()
            await chunks.append_chunk(shop.db, rollout.id, 0, tokens, logps, version.id, finish="stop")
            await rollouts.score_rollout(shop.db, rollout.id, {"r": float(rollout.k)}, float(rollout.k), "text")
    chosen = await groups.groups(shop.db, [group.id for group in admitted])
    drawn = draft(chosen, {g.row: 3 for g in chosen}, context.config, stands.planned + 1)
    new = steps.NewStep(
        n=stands.planned + 1,
        version_in=version.id,
        seed=drawn.seed,
        max_staleness=4,
        settings=msgspec.to_builtins(drawn.settings),
        numerics=NUMERICS,
        groups=drawn.groups,
        rollouts=drawn.rollouts,
    )
    return await steps.record_step(shop.db, shop.job.id, new)


async def learn(shop: Workshop, learner: Learner) -> None:
    step = await record(shop)
    await learner.learn(step, {"tokens_generated": 8, "reward_mean": 0.5}, lambda: {"total": 2.0}, [])


async def started(shop: Workshop, process: Process) -> Learner:
    learner = Learner(shop.context)
    await learner.start(process)
    return learner


async def kinds(shop: Workshop) -> list[str]:
    return [event.kind for event in await events.after(shop.db, shop.job.id, 0)]


async def test_a_fresh_job_loads_the_start_model_and_writes_version_0(shop: Workshop):
    process = Process()
    learner = await started(shop, process)
    assert process.calls == ["load", "publish 0"]
    assert learner.ready
    assert learner.written is not None
    assert learner.written.version.step == 0


async def test_a_new_process_replays_the_steps_after_the_checkpoint(shop: Workshop):
    learner = await started(shop, Process())
    await learn(shop, learner)
    await learner.save()
    await learn(shop, learner)
    process = Process()
    learner = await started(shop, process)
    assert process.calls == ["load", "learn 2", "publish 2"]
    assert (await kinds(shop)).count("replayed") == 1


async def test_a_publication_of_a_new_process_claims_no_change(shop: Workshop):
    """It has nothing to compare with: a step that changed nothing must not look like weights that were not loaded."""
    learner = await started(shop, Process())
    assert learner.written is not None
    assert learner.written.changed == 0.0
    await learn(shop, learner)
    assert learner.written.changed == 1.0


async def test_without_a_process_a_call_fails_as_on_a_dead_one(shop: Workshop):
    learner = await started(shop, Process())
    step = await record(shop)
    learner.lost()
    with pytest.raises(EngineDiedError, match="the learner is not running"):
        await learner.learn(step, {}, dict, [])
    with pytest.raises(EngineDiedError):
        await learner.probe()
    with pytest.raises(EngineDiedError):
        await learner.save()


async def test_a_call_that_waited_behind_one_that_died_is_told_so(shop: Workshop):
    process = Process()
    learner = await started(shop, process)
    step = await record(shop)
    async with learner._turn:
        waiting = asyncio.create_task(learner.learn(step, {}, dict, []))
        await asyncio.sleep(0)
        learner.lost()
    with pytest.raises(EngineDiedError):
        await waiting


class TestADivergedReplay:
    async def test_makes_the_step_again_under_a_new_version_with_the_metrics_it_had(self, shop: Workshop):
        learner = await started(shop, Process())
        for _ in range(3):
            await learn(shop, learner)
        old = await versions.steps_by_id(shop.db, shop.job.id)
        process = Process(drift="'")
        learner = await started(shop, process)
        assert process.calls == ["load", "learn 1", "publish 1"]
        assert learner.version is not None
        assert learner.version.id not in old
        stands = await progress.progress(shop.db, shop.job.id)
        assert (stands.applied, stands.recorded, stands.planned, stands.lost) == (1, 2, 3, 3)
        (row,) = await metrics.metrics(shop.db, shop.job.id)
        assert row["tokens_generated"] == 8
        assert row["reward_mean"] == 0.5
        assert row["time"] == {"total": 2.0, "learn": 1.0}

    async def test_never_offers_the_lost_version_to_an_engine(self, shop: Workshop):
        learner = await started(shop, Process())
        for _ in range(2):
            await learn(shop, learner)
        lost = learner.written
        assert lost is not None
        process, seen = Process(drift="'"), []
        original = process.publish

        async def publish(frame: wire.Publish) -> wire.Published:
            seen.append(learner.written)
            return await original(frame)

        process.publish = publish
        await learner.start(process)
        assert seen == [None]
        assert learner.written is not None
        assert learner.written.version.step == 1


class TestSaving:
    async def state(self, shop: Workshop) -> list[tuple[str, int]]:
        def rows(connection):
            return [tuple(r) for r in connection.execute("SELECT state, version_id FROM checkpoint ORDER BY id")]

        return await shop.db.read(rows)

    async def test_goes_over_what_a_killed_daemon_left_in_the_directory(self, shop: Workshop):
        learner = await started(shop, Process())
        await learn(shop, learner)
        version = await versions.latest_trained(shop.db, shop.job.id)
        target = shop.context.job_dir / "checkpoints" / str(version.id)
        row = await checkpoints.begin(shop.db, shop.job.id, version.id, str(target))
        target.mkdir(parents=True)
        await shop.db.write(lambda c: c.execute("UPDATE checkpoint SET state = 'deleting' WHERE id = ?", (row.id,)))
        await learner.save()
        assert await self.state(shop) == [(CheckpointState.COMMITTED, version.id)]

    async def test_replaces_a_checkpoint_that_did_not_verify(self, shop: Workshop):
        learner = await started(shop, Process())
        await learn(shop, learner)
        await learner.save()
        (kept,) = await checkpoints.newest_valid(shop.db, shop.job.id)
        learner = await started(shop, Process(bad=frozenset({kept.dir})))
        assert "checkpoint_bad" in await kinds(shop)
        await learner.save()
        (again,) = await checkpoints.newest_valid(shop.db, shop.job.id)
        assert again.step == 1
        assert again.id != kept.id

    async def test_of_a_saved_version_does_nothing(self, shop: Workshop):
        process = Process()
        learner = await started(shop, process)
        await learn(shop, learner)
        await learner.save()
        await learner.save()
        assert process.calls.count("checkpoint 1") == 1

    async def test_deletes_checkpoints_past_the_limit_and_rollouts_that_they_covered(self, shop: Workshop):
        learner = await started(shop, Process())
        first = await record(shop)
        await learner.learn(first, {"tokens_generated": 8}, dict, [])
        await learner.save()
        for _ in range(2):
            await learn(shop, learner)
            await learner.save()
        assert [c.step for c in await checkpoints.newest_valid(shop.db, shop.job.id)] == [3, 2]
        assert sorted(p.name for p in (shop.context.job_dir / "checkpoints").iterdir()) == ["3", "4"]
        assert await chunks.rollout_data(shop.db, first.groups) == {}


async def test_a_replay_that_lacks_rollouts_is_refused_and_changes_nothing(shop: Workshop):
    """With every checkpoint damaged and the first rollouts collected there is no way back: say so, void nothing."""
    learner = await started(shop, Process())
    for _ in range(3):
        await learn(shop, learner)
        await learner.save()
    kept = await checkpoints.newest_valid(shop.db, shop.job.id)
    with pytest.raises(StateError, match="no checkpoint of job 1 verifies"):
        await started(shop, Process(bad=frozenset(c.dir for c in kept)))
    assert [s.state for s in await steps.applied_after(shop.db, shop.job.id, 0)] == [StepState.APPLIED] * 3
    assert (await versions.latest_trained(shop.db, shop.job.id)).state is VersionState.TRAINED


async def test_publications_that_no_engine_needs_are_removed(shop: Workshop):
    learner = await started(shop, Process())
    for _ in range(3):
        await learn(shop, learner)
    assert sorted(p.name for p in shop.context.weights_dir.iterdir()) == ["v3.1", "v4.1"]


async def test_a_new_process_leaves_alone_the_publication_that_an_engine_may_be_loading(shop: Workshop):
    learner = await started(shop, Process())
    before = learner.written
    assert before is not None
    learner.in_use = before.dir
    await learner.start(Process())
    assert learner.written is not None
    assert learner.written.dir != before.dir
    assert before.dir.is_dir()
