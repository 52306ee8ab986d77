"""The learner's side of the pipeline: load, replay, learn, write publications and checkpoints.

consumes     recorded steps (the redo log), Save actions
produces     applied steps with their fingerprints, policy versions, publications on disk, checkpoints
waits for    the learner process: its frames within `learner_silence`, one call at a time
unblocked by a recorded step

Recovery = newest valid checkpoint + the recorded steps after it. A replayed step must reproduce its fingerprint; where
it does not, the steps from there on are void and are learned again under new version ids (the redo log).
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from rlhfd.core import crash, wire
from rlhfd.core.ledger import reproduces
from rlhfd.core.metrics import whole
from rlhfd.core.types import Checkpoint, RolloutId, Step, StepId, Version
from rlhfd.engines.learner import LearnerClient
from rlhfd.errors import BadCheckpointError, EngineDiedError, LearnerFault, StateError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.frames import group_frames, learner_settings, threads, tokens_bytes
from rlhfd.pipeline.samples import Samples, describe
from rlhfd.store import checkpoints, metrics, progress, replay, steps, versions

PROBE_SEED = 20_231
Times: TypeAlias = Callable[[], dict[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """Weights on disk for the generator. canary: float32 [len - 1] per sequence, as the learner computes them.

    changed: share of the weights that differ from the publication before; 0.0 where this process has written none.
    """

    version: Version
    dir: Path
    changed: float
    canary: tuple[bytes, ...]
    seconds: float


class Learner:
    """One learner process and what it holds; a dead one is replaced by `start` again, from checkpoint and log."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._client: LearnerClient | None = None
        self._lives = 0
        self._turn = asyncio.Lock()  # one call at a time: learn, publish, probe, checkpoint
        self.ready = False
        self.doing = ""
        self.numerics: dict[str, str] = {}
        self.version: Version | None = None
        self.written: Publication | None = None
        self.in_use: Path | None = None  # the publication that an engine serves or loads

    async def start(self, client: LearnerClient) -> None:
        """Load the newest checkpoint that verifies, replay the steps after it, write the publication of the result."""
        async with self._turn:
            self._client, self.ready = client, False
            self._lives += 1
            base = await self._load(client)
            await self._replay(client, base)
            await self._write(first=True)
            self.ready = True

    def heard(self, frame: wire.Progress) -> None:
        """A heartbeat of the call under way."""
        self.doing = f"{frame.phase} {frame.done}/{frame.total}"
        crash.here("learn.progress")

    def lost(self) -> None:
        """The process is gone."""
        self.ready, self._client = False, None

    @property
    def client(self) -> LearnerClient:
        """The live process. Raises EngineDiedError when there is none: its keeper will bring up another."""
        if self._client is None:
            raise EngineDiedError("the learner is not running")
        return self._client

    async def _load(self, client: LearnerClient) -> int:
        """The step loaded. Raises StateError where rollouts of the steps after it are gone: they can't be replayed."""
        context = self._context
        gone = await progress.collected_to(context.db, context.job_id)
        for checkpoint in await checkpoints.newest_valid(context.db, context.job_id):
            if checkpoint.step < gone:
                break
            try:
                return await self._load_from(client, checkpoint)
            except BadCheckpointError as fault:
                await checkpoints.mark_bad(context.db, checkpoint.id, str(fault))
        if gone:
            raise StateError(
                f"no checkpoint of job {context.job_id} verifies from step {gone} on, and the rollouts up to there are "
                "deleted, so nothing can be replayed; restore the state directory, or submit the job again"
            )
        return await self._load_from(client, None)

    async def _load_from(self, client: LearnerClient, checkpoint: Checkpoint | None) -> int:
        context = self._context
        loaded = await client.load(
            wire.Load(
                model_dir=str(context.model_dir),
                checkpoint_dir=None if checkpoint is None else checkpoint.dir,
                settings=learner_settings(context),
                threads=threads(context),
            )
        )
        self.numerics = loaded.numerics
        return loaded.step

    async def _replay(self, client: LearnerClient, base: int) -> None:
        """Relearn the applied steps after `base`; at the first that differs, void the rest and go on from there."""
        context = self._context
        for step in await steps.applied_after(context.db, context.job_id, base):
            if step.numerics != self.numerics:
                await context.event("numerics_changed", step=step.n, was=step.numerics, now=self.numerics)
            learned = await self._call(client, step, trace=[])
            recorded = msgspec.convert(step.fingerprint, wire.Fingerprint)
            if not reproduces(recorded, learned.fingerprint, exact=self.numerics.get("device") == "cpu"):
                await self._diverged(step, learned)
                break
            await replay.confirm_replay(context.db, step.id)
        self.version = await versions.latest_trained(context.db, context.job_id)

    async def _diverged(self, step: Step, learned: wire.Learned) -> None:
        """What was learned just now stands, under a new version id; the steps after it wait in the log again.

        The row of metrics is the old one, but for what the learner measured.
        """
        context = self._context
        self.written = None  # of a version that is lost now
        before = await metrics.metrics(context.db, context.job_id, step.n - 1)
        row = before[0]
        detail = {"recorded": step.fingerprint, "replayed": msgspec.to_builtins(learned.fingerprint)}
        again = await replay.void_from(context.db, context.job_id, step.n, self.numerics, detail)
        times = {**row.get("time", {}), **learned.times}
        await self._apply(again[0], learned, {**row, **learned.metrics, "time": times}, {})

    async def learn(
        self,
        step: Step,
        row: Mapping[str, object],
        times: Callable[[], dict[str, float]],
        shown: Sequence[RolloutId],
    ) -> None:
        """Learn a recorded step, apply it, write its publication.

        `row`: the daemon's share of the row; `times`: its seconds, read when the step is learned; `shown`: the
        rollouts whose tokens become samples.
        """
        async with self._turn:
            learned = await self._call(self.client, step, trace=[*shown])
            crash.here("learn.answered")
            samples = await describe(self._context, step, learned.traces)
            await self._apply(step.id, learned, {**row, "time": {**times(), **learned.times}}, samples)
            crash.here("learn.applied")
            if step.n < self._context.max_steps:
                await self._write()

    async def _call(self, client: LearnerClient, step: Step, trace: list[int]) -> wire.Learned:
        frames = await group_frames(self._context, step)
        crash.here("learn.sent")
        settings = msgspec.convert(step.settings, wire.StepSettings)
        call = wire.Learn(step=step.n, version_in=step.n - 1, groups=len(frames), settings=settings, trace=trace)
        return await client.learn(call, frames)

    async def _apply(self, step_id: StepId, learned: wire.Learned, row: Mapping[str, object], samples: Samples) -> None:
        """One transaction: step applied, fingerprint, new version, groups consumed, samples."""
        self.version = await steps.apply_step(
            self._context.db,
            step_id,
            fingerprint=msgspec.to_builtins(learned.fingerprint),
            metrics=whole({**learned.metrics, **row}),
            samples=samples,
        )

    async def _write(self, *, first: bool = False) -> None:
        """Write the publication of the version in memory; earlier ones that no engine needs any more are removed.

        The `first` of a process has none before it to differ from: all that it says of a change is unknown.
        """
        version, context = self.version, self._context
        if version is None:
            raise StateError(f"job {context.job_id} has no policy version")
        started = asyncio.get_running_loop().time()
        target = context.weights_dir / f"v{version.id}.{self._lives}"  # an engine may be loading a dead process's
        published = await self._publish(target, None)
        old, self.written = (
            self.written,
            Publication(
                version=version,
                dir=target,
                changed=0.0 if first else published.changed,
                canary=tuple(published.canary),
                seconds=asyncio.get_running_loop().time() - started,
            ),
        )
        keep = {target, self.in_use, None if old is None else old.dir}
        for path in context.weights_dir.glob("v*"):
            if path not in keep:
                shutil.rmtree(path, ignore_errors=True)

    async def probe(self) -> Publication:
        """A publication with every tensor visibly moved (5 % of its own spread), to show that the engine follows."""
        async with self._turn:
            if self.version is None:
                raise LearnerFault("the learner has loaded nothing to probe with")
            target = self._context.weights_dir / "probe"
            published = await self._publish(target, PROBE_SEED)
            return Publication(
                version=self.version, dir=target, changed=1.0, canary=tuple(published.canary), seconds=0.0
            )

    async def _publish(self, target: Path, noise_seed: int | None) -> wire.Published:
        canary = [tokens_bytes(sequence) for sequence in self._context.canary]
        return await self.client.publish(wire.Publish(dir=str(target), noise_seed=noise_seed, canary=canary))

    async def save(self) -> None:
        """Checkpoint by the protocol: files durable first, then the row; then what retention no longer covers goes."""
        async with self._turn:
            context, version = self._context, self.version
            client = self.client
            if version is None:
                raise LearnerFault("the learner has loaded nothing to save")
            kept = await checkpoints.newest_valid(context.db, context.job_id)
            if any(checkpoint.version_id == version.id for checkpoint in kept):
                return
            await prune(context)  # a damaged or unfinished one may still have the directory
            target = context.job_dir / "checkpoints" / str(version.id)
            row = await checkpoints.begin(context.db, context.job_id, version.id, str(target))
            crash.here("save.begun")
            call = wire.Checkpoint(dir=str(target), version_id=version.id, epoch=context.epoch)
            saved = await client.checkpoint(call)
            crash.here("save.durable")
            await checkpoints.commit(context.db, row.id, saved.manifest_sha, saved.nbytes)
            crash.here("save.committed")
            await prune(context)


async def prune(context: Context) -> None:
    """Delete checkpoints past `save_total_limit`, in the opposite order of making them, then rollouts they covered."""
    for old in await checkpoints.prune(context.db, context.job_id, context.config.checkpoint.save_total_limit):
        await asyncio.to_thread(shutil.rmtree, old.dir, ignore_errors=True)
        await checkpoints.forget(context.db, old.id)
    await checkpoints.collect_rollouts(context.db, context.job_id, context.config.checkpoint.save_total_limit)
