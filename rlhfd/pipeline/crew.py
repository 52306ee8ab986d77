"""The children of one job attempt and the parts that drive them: generator, learner, rewards.

consumes     the lease (which devices each role may use)
produces     a commissioned engine, a replayed learner, a ready reward pool; fresh ones after a loss
waits for    starts (deadlines), exits
unblocked by the keepers' own loops

On a shared device the roles come up one after the other, the learner first.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from rlhfd.core.plan import Key
from rlhfd.core.types import Epoch
from rlhfd.engines.channel import Channel
from rlhfd.engines.learner import LearnerClient
from rlhfd.engines.process import Child, ChildSpec, spawn
from rlhfd.engines.rewards import RewardPool
from rlhfd.engines.vllm import VllmServer
from rlhfd.errors import RlhfdError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.generate import Generator
from rlhfd.pipeline.keeper import Keeper
from rlhfd.pipeline.learn import Learner
from rlhfd.pipeline.publish import Publisher
from rlhfd.pipeline.score import Scorer

ROLE_OF_EFFECT = {"generate": "generator", "publish": "generator", "learn": "learner", "save": "learner"}


class Crew:
    """Everything that lives as long as the attempt."""

    def __init__(self, context: Context, pool: RewardPool) -> None:
        self._context = context
        self.generator = Generator(context)
        self.learner = Learner(context)
        self.publisher = Publisher(context, self.generator, self.learner)
        self.pool = pool
        self.scorer = Scorer(context, pool)
        self._wake = asyncio.Event()
        self._learner_ready = asyncio.Event()
        self._keepers = {
            "generator": Keeper(context, "generator", self._spawn_generator, self._commission, self._generator_lost),
            "learner": Keeper(context, "learner", self._spawn_learner, self._load, self._learner_lost),
        }

    async def run(self, wake: asyncio.Event) -> None:
        """Keep all of them alive until cancelled; raises what one of them could not recover from."""
        self._wake = wake
        tasks = [asyncio.create_task(self.pool.start()), *(asyncio.create_task(k.run()) for k in self._keepers.values())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End the reward workers; the keepers ended theirs."""
        await self.pool.close()

    def waiting(self) -> str | None:
        """What is still coming up, in words."""
        coming = [
            name
            for name, ready in (("learner", self.learner.ready), ("generator", self.generator.client is not None))
            if not ready
        ]
        return f"starting the {' and the '.join(coming)}" if coming else None

    def busy(self) -> frozenset[Key]:
        """An engine that is not in service takes no publication."""
        return frozenset() if self.generator.client is not None else frozenset({("publish", 0)})

    def role_of(self, key: Key | None) -> str | None:
        """Which child an effect depends on."""
        return None if key is None else ROLE_OF_EFFECT.get(key[0])

    def suspect(self, role: str, error: RlhfdError) -> None:
        """An effect failed on it: replace it."""
        self._keepers[role].suspect(error)

    def applied(self) -> None:
        """A step was applied: earlier losses no longer count."""
        for keeper in self._keepers.values():
            keeper.losses = 0

    # --- generator ------------------------------------------------------------------------------------------------

    async def _spawn_generator(self) -> Child:
        if self._context.shared:
            await self._learner_ready.wait()
        spec = self._server().spec(self._spec("generator"))
        return await self._recorded(spawn(spec))

    def _server(self) -> VllmServer:
        context = self._context
        return VllmServer(
            model_dir=context.model_dir,
            socket_path=context.run_dir / "generator.sock",
            dtype=context.config.model.dtype,
            max_model_len=context.max_model_len,
            max_num_seqs=context.max_streams,
            devices=context.devices["generator"],
            engine_args=context.config.generator.engine_args,
        )

    async def _commission(self, child: Child) -> None:
        client = await self._server().healthy(child, self._context.settings.deadlines)
        await self._learner_ready.wait()
        await self.publisher.commission(client)
        self._wake.set()

    def _generator_lost(self) -> None:
        self.generator.client, self.generator.open = None, False
        self._wake.set()

    # --- learner --------------------------------------------------------------------------------------------------

    async def _spawn_learner(self) -> Child:
        return await self._recorded(spawn(self._spec("learner", "-m", "rlhfd.workers.learner")))

    async def _load(self, child: Child) -> None:
        client = await LearnerClient.connect(child, self._context.epoch, self._context.settings.deadlines)
        await self.learner.start(client)
        self._learner_ready.set()
        self._wake.set()

    def _learner_lost(self) -> None:
        self._learner_ready.clear()
        self.learner.lost()
        self._wake.set()

    # --- children -------------------------------------------------------------------------------------------------

    def _spec(self, role: str, *arguments: str) -> ChildSpec:
        context = self._context
        devices = context.devices[role]
        cores = tuple(core for device in devices for core in device.cores)
        return ChildSpec(
            role=role,
            job_id=context.job_id,
            attempt=context.attempt,
            epoch=context.epoch,
            argv=(sys.executable, *arguments),
            log_path=context.log_path(role),
            cores=cores or None,
            gpus=tuple(device.id for device in devices if device.kind == "gpu"),
            channel=True,
        )

    async def _recorded(self, spawning: Awaitable[Child]) -> Child:
        """A child is in the table before anything waits for it, so that a new epoch can sweep it."""
        child = await spawning
        await self._context.store.children.record_child(self._context.job_id, child)
        return child


Spawner = Callable[[], Awaitable[Child]]
__all__ = ["Channel", "Crew", "Epoch", "Spawner"]
