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
from rlhfd.core.types import Group, Ordinal, StepId, VersionStep
from rlhfd.errors import DeadlineError, EngineError, RlhfdError
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.crew import Crew
from rlhfd.pipeline.samples import worth_showing
from rlhfd.pipeline.stopwatch import Stopwatch, waits_for


class Stop(StrEnum):
    """Why a run is asked to end early. drain: the daemon goes; the job stays `running` and goes on at the next start."""

    PAUSE = "pause"
    CANCEL = "cancel"
    DRAIN = "drain"


class JobRun:
    """One attempt at one job."""

    def __init__(self, context: Context, rules: Rules, crew: Crew) -> None:
        self._context = context
        self._rules = rules
        self._crew = crew
        self._wake = asyncio.Event()
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._stop: Stop | None = None
        self._watch = Stopwatch(asyncio.get_running_loop().time)
        self.phase = "starting"

    def ask(self, stop: Stop) -> None:
        """End as soon as what is acknowledged is safe."""
        self._stop = stop
        self._wake.set()

    async def run(self) -> Stop | None:
        """To the end of the job (None), or as it was asked to stop. Raises what failed it."""
        keepers = asyncio.create_task(self._crew.run(self._wake))
        keepers.add_done_callback(self._settle)
        try:
            await self._loop()
            if self._stop in {Stop.PAUSE, Stop.DRAIN}:
                await self._wind_down()
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
        first = await context.store.rollouts.next_ordinal(context.job_id)
        due = overlap.deadline(VersionStep(view.engine.version), self._rules.pace.max_staleness)
        rows = [
            (Ordinal(n), row_of(context.config.job.seed, n, context.snapshot.rows), due)
            for n in range(first, first + count)
        ]
        generations = context.config.rollout.num_generations
        await context.store.rollouts.admit(context.job_id, rows, generations, view.start_version)
        self._wake.set()

    async def _record(self, ordinals: tuple[Ordinal, ...], view: View) -> None:
        """The step, its groups and every value in force: one transaction, before it is learned (the redo log)."""
        context, n = self._context, view.start_version + 1
        chosen = [group for group in view.groups if group.ordinal in ordinals]
        chosen.sort(key=lambda group: group.ordinal)
        lengths = {group.row: len(context.snapshot.row(group.row).tokens) for group in chosen}
        step = draft(chosen, lengths, context.config, n)
        version = await context.store.versions.latest_trained(context.job_id)
        await context.store.steps.record_step(
            context.job_id,
            n=n,
            version_in=version.id,
            seed=step.seed,
            settings=msgspec.to_builtins(step.settings),
            numerics=self._crew.learner.numerics,
            groups=step.groups,
            rollouts=step.rollouts,
        )
        crash.here("step.recorded")
        self._wake.set()

    # --- effects: tasks that end in one transaction ---------------------------------------------------------------

    def _start(self, action: Effect) -> None:
        task = asyncio.create_task(self._effect(action), name=f"job {self._context.job_id} {action.key}")
        self._tasks[action.key] = task
        task.add_done_callback(lambda done: self._ended(action.key, done))

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
        context, publisher = self._context, self._crew.publisher
        seconds = await publisher.publish()
        written = self._crew.learner.written
        if written is not None and written.version.step > 0:
            await context.store.steps.set_publish_time(
                context.job_id, written.version.step, round(seconds + written.seconds, 4)
            )

    async def _learn(self) -> None:
        context = self._context
        step = await context.store.steps.recorded(context.job_id)
        if step is None:
            return
        groups = await context.store.rollouts.groups(step.groups)
        metrics = await self._metrics(step.id, step.n, groups)
        await self._crew.learner.learn(step, metrics, worth_showing(groups))
        self._crew.applied()

    async def _metrics(self, step_id: StepId, n: int, groups: tuple[Group, ...]) -> dict[str, object]:
        """The daemon's share of the step's row; the learner's comes with its answer."""
        store, job = self._context.store, self._context.job_id
        facts = await store.steps.facts(step_id)
        times = self._watch.lap()
        return {
            **summarise(facts, version=VersionStep(n - 1)),
            "step": n,
            "version": n - 1,
            "dropped_groups": await store.rollouts.dropped_since(job, n - 1),
            "overcommit": self._rules.pace.overcommit,
            "chunk_tokens": 0,
            "tokens_generated": self._crew.generator.tokens_since(),
            "time": times,
            "groups": len(groups),
        }

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        self._settle(task, key)

    def _settle(self, task: asyncio.Task[None], key: Key | None = None) -> None:
        """A lost engine or learner is its keeper's business; every other failure is the job's."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            role = self._crew.role_of(key) if isinstance(error, (EngineError, DeadlineError)) else None
            if role is None or not isinstance(error, RlhfdError):
                self._failure = self._failure or error
            else:
                self._crew.suspect(role, error)
        self._wake.set()

    # --- the view and the end -------------------------------------------------------------------------------------

    async def _view(self) -> View:
        store, job_id, crew = self._context.store, self._context.job_id, self._crew
        progress = await store.steps.progress(job_id)
        written = crew.learner.written
        return View(
            rules=self._rules,
            groups=await store.rollouts.live_groups(job_id),
            applied=progress.applied,
            recorded=progress.recorded,
            saved=progress.saved,
            learner=LearnerView(
                ready=crew.learner.ready, written=-1 if written is None else written.version.step
            ),
            engine=EngineView(
                open=crew.generator.open, version=progress.published, drained=crew.generator.in_flight == 0
            ),
            busy=frozenset(self._tasks) | crew.busy(),
        )

    async def _wind_down(self) -> None:
        """Partial rollouts committed, the learner's call finished, a checkpoint if it fits the time."""
        try:
            async with asyncio.timeout(self._context.settings.deadlines.drain):
                await self._crew.publisher.hold()
                learning = [task for key, task in self._tasks.items() if key[0] in {"learn", "save"}]
                await asyncio.gather(*learning, return_exceptions=True)
                progress = await self._context.store.steps.progress(self._context.job_id)
                if self._crew.learner.ready and progress.saved < progress.applied:
                    await self._crew.learner.save()
        except (TimeoutError, EngineError, DeadlineError) as error:
            await self._context.event("drain_cut_short", why=str(error) or "it did not fit the time")

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rules_of(context: Context) -> Rules:
    """The job file's numbers as the planner takes them."""
    rollout, resources = context.config.rollout, context.config.resources
    shared = str(resources.learner).startswith("share:")
    pace = overlap.Pace(
        groups_per_step=rollout.groups_per_step,
        max_staleness=rollout.max_staleness,
        overcommit=overlap.cut_overcommit(rollout.overcommit, rollout.groups_per_step, rollout.max_staleness),
        max_steps=context.config.job.max_steps,
        batch_order=rollout.batch_order,
    )
    return Rules(
        pace=pace,
        together=rollout.overlap_learning and not shared,
        save_steps=context.config.checkpoint.save_steps,
        max_streams=context.config.generator.max_num_seqs,
    )


