"""One job's loop: load the view, plan, act, wait for something to change.

    view ◄─ tables          consumes     finished effects, keepers' news
      │ plan (core/plan.py)  produces     admissions, recorded steps, effects as tasks
      ▼                      waits for    `wake`; if nothing moves within the stall deadline it says what is missing
    actions ─► effects ─► COMMIT ─► wake

Starting after a crash is the same path: the tables say what is there.
"""

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

import msgspec

from rlhfd.core import crash, overlap
from rlhfd.core.ledger import draft
from rlhfd.core.metrics import summarise
from rlhfd.core.order import row_of
from rlhfd.core.plan import (
    Action,
    Admit,
    Effect,
    EngineView,
    Finish,
    Generate,
    Hold,
    Key,
    Learn,
    LearnerView,
    Publish,
    Record,
    Rules,
    Save,
    Score,
    View,
    missing,
    plan,
)
from rlhfd.core.types import Ordinal, Step, VersionStep
from rlhfd.engines.rewards import RewardPool
from rlhfd.errors import DeadlineError, EngineError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.crew import Crew
from rlhfd.pipeline.samples import worth_showing
from rlhfd.pipeline.stopwatch import Stopwatch, waits_for
from rlhfd.store import chunks, groups, progress, rollouts, steps, versions


class Stop(StrEnum):
    """Why a run ends early. drain: the daemon goes; the job stays `running` and goes on at the next start."""

    PAUSE = "pause"
    CANCEL = "cancel"
    DRAIN = "drain"


class JobRun:
    """One attempt at one job."""

    def __init__(self, context: Context, pool: RewardPool) -> None:
        self._context = context
        self._rules = rules_of(context)
        self._wake = asyncio.Event()
        self._crew = Crew(context, pool, self._wake.set)
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._stop: Stop | None = None
        self._watch = Stopwatch(asyncio.get_running_loop().time)
        self.phase = "starting"

    @property
    def asked(self) -> Stop | None:
        """What it was asked for last."""
        return self._stop

    def ask(self, stop: Stop) -> None:
        """End as soon as what is acknowledged is safe."""
        self._stop = stop
        self._wake.set()

    async def run(self) -> Stop | None:
        """To the end of the job (None), or as it was asked to stop. Raises what failed it."""
        keepers = asyncio.create_task(self._crew.run(), name="keepers")
        keepers.add_done_callback(self._settle)
        try:
            await rollouts.park(self._context.db, self._context.job_id)
            await self._loop()
            if self._stop in {Stop.PAUSE, Stop.DRAIN}:
                await self._wind_down()
            if self._failure is not None:  # of an effect that the winding down waited for
                raise self._failure
            return self._stop
        finally:
            await self._cancel([*self._tasks.values(), keepers])
            await self._crew.close()

    async def _loop(self) -> None:
        while self._failure is None and self._stop is None:
            self._wake.clear()
            view = await self._view()
            self.phase = self._crew.waiting() or missing(view)
            self._watch.switch(waits_for(view))
            for action in plan(view):
                if isinstance(action, Finish):
                    return
                await self._act(action, view)
            await self._wait(view)
        if self._failure is not None:
            raise self._failure

    async def _wait(self, view: View) -> None:
        """Until something changes. Effects and keepers have deadlines of their own; this one catches what has none."""
        limit = self._context.settings.deadlines.stall
        try:
            async with asyncio.timeout(limit):
                await self._wake.wait()
        except TimeoutError:
            if not self._tasks and self._crew.waiting() is None:
                raise DeadlineError(f"nothing moved for {limit:.0f} s; the job waits for {missing(view)}") from None

    async def _act(self, action: Action, view: View) -> None:
        match action:
            case Admit():
                await self._admit(action.count, view)
            case Record():
                await self._record(action.ordinals, view)
            case Finish():
                raise AssertionError("a finished job has nothing to do")
            case _:
                self._start(action)

    # --- what changes tables alone --------------------------------------------------------------------------------

    async def _admit(self, count: int, view: View) -> None:
        context = self._context
        first = await groups.next_ordinal(context.db, context.job_id)
        due = overlap.deadline(VersionStep(view.engine.version), self._rules.pace.max_staleness)
        rows = [(Ordinal(n), self._row(n), due) for n in range(first, first + count)]
        generations = context.config.rollout.num_generations
        await groups.admit(context.db, context.job_id, rows, generations, VersionStep(view.start_version))
        self._wake.set()

    def _row(self, ordinal: int) -> int:
        """Row of the snapshot that a group samples: a pure function of seed and ordinal, so resume needs no cursor."""
        config, rows = self._context.config, self._context.snapshot.rows
        return row_of(config.job.seed, ordinal, rows) if config.data.shuffle else ordinal % rows

    async def _record(self, ordinals: tuple[Ordinal, ...], view: View) -> None:
        """The step, its groups and every value in force: one transaction, before it is learned (the redo log)."""
        context, n = self._context, view.start_version + 1
        chosen = [group for group in view.groups if group.ordinal in ordinals]
        chosen.sort(key=lambda group: group.ordinal)
        lengths = {group.row: len(context.snapshot.row(group.row).tokens) for group in chosen}
        step = draft(chosen, lengths, context.config, n)
        version = await versions.latest_trained(context.db, context.job_id)
        await steps.record_step(
            context.db,
            context.job_id,
            steps.NewStep(
                n=n,
                version_in=version.id,
                seed=step.seed,
                max_staleness=self._rules.pace.max_staleness,
                settings=msgspec.to_builtins(step.settings),
                numerics=self._crew.learner.numerics,
                groups=step.groups,
                rollouts=step.rollouts,
            ),
        )
        crash.here("step.recorded")
        self._wake.set()

    # --- effects: tasks that end in one transaction ---------------------------------------------------------------

    def _start(self, action: Effect) -> None:
        task = asyncio.create_task(self._effect(action), name=f"job {self._context.job_id} {action.key}")
        self._tasks[action.key] = task
        life = self._crew.life(action.key)
        task.add_done_callback(lambda done: self._ended(action.key, done, life))

    def _effect(self, action: Effect) -> Coroutine[Any, Any, None]:
        match action:
            case Generate():
                return self._crew.generator.generate(action)
            case Score():
                return self._crew.scorer.score(action)
            case Hold():
                return self._crew.publisher.hold()
            case Publish():
                return self._publish()
            case Learn():
                return self._learn()
            case Save():
                return self._crew.learner.save()

    async def _publish(self) -> None:
        """Load and check; its seconds join the row of the step that made the version."""
        served = await self._crew.publisher.publish()
        if served is not None and served.step > 0:
            await progress.set_publish_time(self._context.db, self._context.job_id, served.step, served.seconds)

    async def _learn(self) -> None:
        context = self._context
        step = await steps.recorded(context.db, context.job_id)
        if step is None:
            return
        shown = worth_showing(await groups.groups(context.db, step.groups))
        row = await self._metrics(step)
        await self._crew.learner.learn(step, row, self._watch.lap, shown)
        self._crew.applied()

    async def _metrics(self, step: Step) -> dict[str, object]:
        """The daemon's share of the step's row; the learner's comes with its answer."""
        context, n = self._context, step.n
        facts = await progress.step_facts(context.db, step.id)
        committed = await chunks.tokens_committed(context.db, context.job_id)
        reported = await progress.tokens_reported(context.db, context.job_id)
        return {
            **summarise(facts, version=VersionStep(n - 1)),
            "step": n,
            "version": n - 1,
            "dropped_groups": await progress.dropped_at(context.db, context.job_id, n - 1),
            "overcommit": self._rules.pace.overcommit,
            "chunk_tokens": 0,
            "learning_rate": step.settings["learning_rates"][-1],
            "tokens_generated": committed - reported,
        }

    def _ended(self, key: Key, task: asyncio.Task[None], life: int) -> None:
        """A lost engine or learner is its keeper's business; every other failure is the job's."""
        del self._tasks[key]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, (EngineError, DeadlineError)) and self._crew.suspect(key, error, life):
            self._wake.set()
        else:
            self._settle(task)

    def _settle(self, task: asyncio.Task[None]) -> None:
        """Its failure, if it has one, is the job's."""
        error = None if task.cancelled() else task.exception()
        self._failure = self._failure or error
        self._wake.set()

    # --- the view and the end -------------------------------------------------------------------------------------

    async def _view(self) -> View:
        context, crew = self._context, self._crew
        # before the tables: what ends or comes up meanwhile is then merely late
        busy, ready = frozenset(self._tasks) | crew.busy(), crew.learner.ready
        stands = await progress.progress(context.db, context.job_id)
        written = -1 if crew.learner.written is None else crew.learner.written.version.step
        return View(
            rules=self._rules,
            groups=await groups.live_groups(context.db, context.job_id),
            applied=stands.applied,
            recorded=stands.recorded,
            planned=stands.planned,
            saved=stands.saved,
            learner=LearnerView(ready=ready and crew.learner.ready, written=written),
            engine=EngineView(
                open=crew.generator.open,
                version=stands.published,
                drained=crew.generator.in_flight == 0,
                floor=stands.lost,
            ),
            busy=busy,
        )

    async def _wind_down(self) -> None:
        """Partial rollouts committed, the learner's call finished, a checkpoint if it fits the time."""
        try:
            async with asyncio.timeout(self._context.settings.deadlines.drain):
                await self._crew.publisher.hold()
                learning = [task for key, task in self._tasks.items() if key[0] in {"learn", "save"}]
                await asyncio.gather(*learning, return_exceptions=True)
                stands = await progress.progress(self._context.db, self._context.job_id)
                if self._crew.learner.ready and stands.saved < stands.applied:
                    await self._crew.learner.save()
        except (TimeoutError, EngineError, DeadlineError) as error:
            await self._context.event("drain_cut_short", why=str(error) or "it did not fit the time")

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rules_of(context: Context) -> Rules:
    """The job file's numbers as the planner takes them."""
    rollout = context.config.rollout
    pace = overlap.Pace(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        overcommit=overlap.cut_overcommit(rollout.overcommit, rollout.groups_per_step, rollout.max_staleness),
        max_steps=context.max_steps,
        batch_order=rollout.batch_order,
    )
    return Rules(
        pace=pace,
        together=rollout.overlap_learning and not context.shared,
        save_steps=context.config.checkpoint.save_steps,
        max_streams=context.max_streams,
    )
