"""The children of one job attempt and the parts that drive them: generator, learner, rewards.

consumes     the lease (which devices each role may use)
produces     a commissioned engine, a replayed learner, a ready reward pool; fresh ones after a loss
waits for    starts (deadlines), exits
unblocked by the keepers' own loops

On a shared device the roles come up one after the other, the learner first.
"""

import asyncio
import sys
from collections.abc import Callable

from rlhfd.core.placement import Role
from rlhfd.core.plan import Key
from rlhfd.engines.learner import LearnerClient
from rlhfd.engines.process import Child, ChildSpec
from rlhfd.engines.rewards import RewardPool
from rlhfd.engines.vllm import EngineDeadlines
from rlhfd.engines.vllm_server import ServerSpec, VllmServer
from rlhfd.errors import DeadlineError, EngineError, EngineStartError, RlhfdError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.generate import Generator
from rlhfd.pipeline.keeper import Keeper
from rlhfd.pipeline.learn import Learner, Publication
from rlhfd.pipeline.publish import Publisher
from rlhfd.pipeline.score import Scorer

ROLE_OF_EFFECT: dict[str, Role] = {
    "generate": "generator",
    "publish": "generator",
    "learn": "learner",
    "save": "learner",
}


class Crew:
    """Everything that lives as long as the attempt. `wake`: called whenever something has come up or been lost."""

    def __init__(self, context: Context, pool: RewardPool, wake: Callable[[], None]) -> None:
        self._context = context
        self._wake = wake
        self.generator = Generator(context)
        self.learner = Learner(context)
        self.publisher = Publisher(context, self.generator, self.learner)
        self._pool = pool
        self.scorer = Scorer(context, pool)
        self._server: VllmServer | None = None
        self._learner_up = asyncio.Event()
        self._keepers: dict[Role, Keeper] = {
            "learner": Keeper(context, "learner", self._spawn_learner, self._load, self._learner_lost),
            "generator": Keeper(context, "generator", self._spawn_server, self._commission, self._server_lost),
        }

    async def run(self) -> None:
        """Keep all of them alive until cancelled; raises what one of them could not recover from."""
        await self._pool.start()
        self.scorer.up.set()
        tasks = [asyncio.create_task(keeper.run()) for keeper in self._keepers.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End the reward workers; the keepers have ended theirs."""
        await self._pool.close()
        await self._forget_server()

    def waiting(self) -> str | None:
        """What is still coming up, in words."""
        up = {"learner": self.learner.ready, "generator": self.generator.client is not None}
        coming = [name for name, ready in up.items() if not ready]
        return f"starting the {' and the '.join(coming)}" if coming else None

    def busy(self) -> frozenset[Key]:
        """An engine that is not in service takes no publication."""
        return frozenset[Key]() if self.generator.client is not None else frozenset({("publish", 0)})

    def life(self, key: Key) -> int:
        """Of the child that an effect depends on; 0 where it depends on none."""
        role = ROLE_OF_EFFECT.get(key[0])
        return 0 if role is None else self._keepers[role].life

    def suspect(self, key: Key, error: RlhfdError, life: int) -> bool:
        """An effect that began in this life of a child failed on it: replace it. False where it depends on none."""
        role = ROLE_OF_EFFECT.get(key[0])
        if role is None:
            return False
        self._keepers[role].suspect(error, life)
        return True

    def applied(self) -> None:
        """A step was applied: earlier losses no longer count."""
        for keeper in self._keepers.values():
            keeper.losses = 0

    # --- generator ------------------------------------------------------------------------------------------------

    async def _spawn_server(self) -> Child:
        context = self._context
        if context.shared:
            await self._learner_up.wait()
        await self._forget_server()
        spec = ServerSpec(
            job_id=context.job_id,
            attempt=context.attempt,
            epoch=context.epoch,
            model_dir=context.model_dir,
            socket=context.run_dir / f"generator.{self._keepers['generator'].life}.sock",
            log_path=context.log_path("generator"),
            dtype=context.config.model.dtype,
            max_model_len=context.max_model_len,
            max_num_seqs=context.max_streams,
            cores=context.cores("generator"),
            gpus=context.gpus("generator"),
            engine_args=context.config.generator.engine_args,
            module=context.engine_module,
        )
        return await context.nursery.whole(self._launch(spec))

    async def _launch(self, spec: ServerSpec) -> Child:
        self._server = await VllmServer.launch(spec, self._deadlines())
        return await self._context.nursery.adopt(self._server.child)

    async def _forget_server(self) -> None:
        """Close the connections to an engine that has ended."""
        if self._server is not None:
            await self._server.client.close()
        self._server = None

    def _deadlines(self) -> EngineDeadlines:
        limits = self._context.settings.deadlines
        return EngineDeadlines(
            start=limits.engine_start,
            first_token=limits.first_token,
            event_gap=limits.event_gap,
            pause=limits.pause,
            reload=limits.pause,
            canary=limits.canary,
        )

    async def _commission(self, _: Child) -> None:
        if self._server is None:
            raise EngineStartError("the generator has no server to commission")
        await self._server.ready()
        await self.publisher.commission(self._server.client, await self._probe())
        self._wake()

    async def _probe(self) -> Publication:
        """Of the learner that is up; one that is lost meanwhile is its keeper's business, and the engine waits."""
        keeper = self._keepers["learner"]
        while True:
            await self._learner_up.wait()
            life = keeper.life
            try:
                return await self.learner.probe()
            except (EngineError, DeadlineError) as error:
                self._learner_up.clear()
                keeper.suspect(error, life)

    def _server_lost(self) -> None:
        self.generator.out_of_service()
        self._wake()

    # --- learner --------------------------------------------------------------------------------------------------

    async def _spawn_learner(self) -> Child:
        context = self._context
        return await context.nursery.spawn(
            ChildSpec(
                role="learner",
                job_id=context.job_id,
                attempt=context.attempt,
                epoch=context.epoch,
                argv=(sys.executable, "-m", "rlhfd.workers.learner"),
                log_path=context.log_path("learner"),
                cores=context.cores("learner"),
                gpus=context.gpus("learner"),
                channel=True,
            )
        )

    async def _load(self, child: Child) -> None:
        context, learner = self._context, self.learner
        client = await LearnerClient.connect(child, context.epoch, context.settings.deadlines, learner.heard)
        await learner.start(client)
        self._learner_up.set()
        self._wake()

    def _learner_lost(self) -> None:
        self._learner_up.clear()
        self.learner.lost()
        self._wake()
