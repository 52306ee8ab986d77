"""Publications into the engine, and the proof that it serves them.

consumes     a publication on disk (learn.py), a fresh engine
produces     published versions: v rises in the store only after the engine runs the weights and is checked
waits for    streams to gain a row, pause, reload, canary (each with its deadline)
unblocked by a version that the learner has written

    close gate → pause(abort) → every stream commits its tokens → reload → reset prefix cache → label → resume
    → canary → COMMIT version published → open gate

Invariant 6 in three checks: a probe at every engine start must be followed; a step that changed a published tensor
must change the canary; and the canary must be near the reference. A failed one is retried once, then the job stops.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfd.core import crash
from rlhfd.core.canary import Distance, distance, follows, near, tolerance
from rlhfd.core.types import VersionState
from rlhfd.engines.vllm import VllmClient
from rlhfd.errors import EngineDiedError, EngineError, WeightSyncError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.generate import Generator
from rlhfd.pipeline.learn import Learner, Publication
from rlhfd.pipeline.published import assert_head
from rlhfd.store import jobs, versions

Canary = Sequence[bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A publication that the engine now serves; `seconds` from trained to served, the writing included."""

    step: int
    seconds: float


class Publisher:
    """Owns the engine's weights: nobody else pauses, loads or resumes."""

    def __init__(self, context: Context, generator: Generator, learner: Learner) -> None:
        self._context = context
        self._generator = generator
        self._learner = learner
        self._served: Canary = ()  # the canary of the version being served
        self._paused = False

    async def commission(self, client: VllmClient, probe: Publication) -> None:
        """Put a fresh engine into service: measure its noise once, load, probe, load again, open the gate."""
        real = self._written()
        self._generator.client, self._generator.version, self._paused = None, None, False
        noise = await self._noise(client, real)
        before = await self._serve(client, real.dir, str(real.version.id))
        self._assert_near(before, real, noise)
        moved = await self._serve(client, probe.dir, "probe")
        if not follows((before, moved), (real.canary, probe.canary), noise):
            raise WeightSyncError(
                f"the generator does not follow a publication: the probe moved its canary by "
                f"{distance(before, moved).mean:.2g} nats where the learner's moved by "
                f"{distance(real.canary, probe.canary).mean:.2g}, and left it {distance(moved, probe.canary).mean:.2g} "
                "away; a part of the weights was not loaded (a tied lm_head, for one)"
            )
        after = await self._serve(client, real.dir, str(real.version.id))
        if list(after) != list(before):
            raise WeightSyncError("the generator did not come back to the published weights after the probe")
        await self._in_service(real, after)
        self._generator.client, self._generator.version, self._generator.open = client, real.version, True

    async def hold(self) -> None:
        """Close the gate and pause; every stream ends with its tokens committed."""
        client = self._generator.client
        if client is None or self._paused:
            return
        deadlines = self._context.settings.deadlines
        if not await self._generator.close_gate(deadlines.publish_patience):
            await self._context.event("publication_impatient", seconds=deadlines.publish_patience)
        await client.pause("abort")
        self._paused = True
        crash.here("publish.paused")
        await self._generator.drained(deadlines.pause)

    async def publish(self) -> Served | None:
        """Load the newest publication and say how long it took; None where it was served already: resume."""
        started = asyncio.get_running_loop().time()
        client = self._generator.client
        if client is None:
            return None
        await self.hold()
        real, version = self._written(), self._generator.version
        if version is not None and real.version.id == version.id:
            await client.resume()
            self._paused, self._generator.open = False, True
            return None
        try:
            served = await self._update(client, real)
        except WeightSyncError as error:
            await self._context.event("publication_retried", step=real.version.step, why=str(error))
            served = await self._update(client, real)
        await self._in_service(real, served)
        if self._generator.client is not client:
            raise EngineDiedError(f"the generator was lost as soon as it served version {real.version.step}")
        self._generator.version, self._generator.open = real.version, True
        seconds = real.seconds + asyncio.get_running_loop().time() - started
        return Served(step=real.version.step, seconds=round(seconds, 4))

    def _written(self) -> Publication:
        if self._learner.written is None:
            raise WeightSyncError("there is no publication to load: the learner has written none")
        self._learner.in_use = self._learner.written.dir
        return self._learner.written

    async def _noise(self, client: VllmClient, real: Publication) -> float:
        """Mean |engine - reference| of the start model, measured once a job and kept with it."""
        job = await jobs.job(self._context.db, self._context.job_id)
        if job.noise is not None:
            return job.noise
        noise = distance(await self._canary(client), real.canary).mean
        await jobs.set_noise(self._context.db, job.id, noise)
        await self._context.event("canary_noise", mean=noise, tolerance=tolerance(noise))
        return noise

    async def _update(self, client: VllmClient, real: Publication) -> Canary:
        served = await self._serve(client, real.dir, str(real.version.id))
        crash.here("publish.loaded")
        if real.changed > 0 and list(served) == list(self._served):
            raise WeightSyncError(
                f"version {real.version.step} changed {real.changed:.2%} of the published weights and not one bit of "
                "the generator's canary: the publication was not loaded"
            )
        self._assert_near(served, real, await self._noise(client, real))
        return served

    async def _serve(self, client: VllmClient, directory: Path, label: str) -> Canary:
        """Load a directory into the (paused) engine and ask it for the canary; the gate stays closed."""
        if not self._paused:
            await client.pause("abort")
        await asyncio.to_thread(assert_head, directory)
        mark = client.log_mark()
        await client.reload(directory)
        lines = client.failed_weight_lines(mark)
        if lines:
            raise WeightSyncError(f"the generator did not load every weight: {lines[-1]}")
        await client.reset_prefix_cache()
        await client.label(label)
        await client.resume()
        self._paused = False
        return await self._canary(client)

    async def _canary(self, client: VllmClient) -> Canary:
        answers = await client.canary([list(sequence) for sequence in self._context.canary])
        return [answer.tobytes() for answer in answers]

    def _assert_near(self, served: Canary, real: Publication, noise: float) -> None:
        if not near(served, real.canary, noise):
            gap: Distance = distance(served, real.canary)
            raise WeightSyncError(
                f"the generator's log-probs under version {real.version.step} are {gap.mean:.2g} nats (mean; max "
                f"{gap.max:.2g}) from the learner's, over the tolerance of {tolerance(noise):.2g}"
            )

    async def _in_service(self, real: Publication, served: Canary) -> None:
        """Raises EngineError where a diverged replay lost the version while it was loaded: load the one made again."""
        db, made = self._context.db, real.version
        if (await versions.version(db, made.id)).state is VersionState.LOST:
            raise EngineError(f"version {made.step} was lost by a diverged replay while the generator loaded it")
        await versions.publish(db, made.id)
        crash.here("publish.recorded")
        self._served = served
