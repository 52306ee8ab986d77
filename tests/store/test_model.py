"""Random histories with crashes, against a model in memory: after each step the store says what the model says.

A crash is a copy of the files as they lie (what kill -9 leaves), opened by a new epoch.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlhfd.core.types import GroupState, RolloutId, RolloutState
from rlhfd.errors import StateError
from rlhfd.store import checkpoints, chunks, groups, jobs, progress, replay, rollouts, steps
from rlhfd.store.db import Database
from rlhfd.testing.nothing_lost import assert_nothing_lost
from tests.store.story import NUMERICS, K, Story, begin, submitted

WINDOW = 0.0001
STALENESS = 2
KEEP = 2


@dataclass
class ModelRollout:
    id: RolloutId
    state: RolloutState = RolloutState.PENDING
    tokens: int = 0


@dataclass
class ModelGroup:
    rollouts: list[ModelRollout]
    deadline: int
    admitted: int
    state: GroupState = GroupState.OPEN


@dataclass
class Model:
    """What the tables must say. `recorded`: groups of the recorded steps in order; `saved`: checkpointed steps."""

    groups: dict[int, ModelGroup] = field(default_factory=dict)
    consumed: list[int] = field(default_factory=list)
    recorded: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    collected: set[int] = field(default_factory=set)
    committed: int = 0
    peak: int = 0  # the newest version that there has been

    def newest(self) -> int:
        """V: the version that the next step to be recorded starts from."""
        return len(self.consumed) + len(self.recorded)

    def sampling(self) -> bool:
        """Versions at the generator never go back: after a divergence it waits until the lost ones are made again."""
        return len(self.consumed) >= self.peak

    def of(self, *states: RolloutState) -> list[tuple[int, ModelRollout]]:
        live = [(g, r) for g, group in self.groups.items() if g not in self.collected for r in group.rollouts]
        return [(g, r) for g, r in live if r.state in states]

    def ready(self) -> list[int]:
        ready = [(g, group) for g, group in self.groups.items() if group.state is GroupState.READY]
        return [g for g, group in ready if group.deadline >= self.newest()]


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp())
        self.lives = 0
        self.model = Model()
        self.open(self.directory / "0")

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def open(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)

        async def start() -> Story:
            self.db = await Database.open(directory / "rlhfd.db", window=WINDOW)
            epoch = await begin(self.db)
            job = await submitted(self.db)
            return Story(db=self.db, job=await jobs.claim(self.db, job.id, epoch) or job, epoch=epoch)

        self.story = self.run(start())

    def teardown(self) -> None:
        self.run(self.db.close())
        assert_nothing_lost(self.db.path)
        self.loop.close()
        shutil.rmtree(self.directory)

    # --- faults

    @rule()
    def crash(self) -> None:
        self.lives += 1
        left = self.directory / str(self.lives)
        left.mkdir()
        for name in ("rlhfd.db", "rlhfd.db-wal"):
            if (source := self.db.path.with_name(name)).exists():
                shutil.copy(source, left / name)
        self.run(self.db.close())
        assert_nothing_lost(left / "rlhfd.db")
        self.open(left)
        self.park()

    @rule()
    def new_epoch(self) -> None:
        self.story.epoch = self.run(begin(self.db))
        self.park()

    def park(self) -> None:
        for _, rollout in self.model.of(RolloutState.GENERATING):
            rollout.state = RolloutState.PARTIAL

    # --- work

    @precondition(lambda self: self.model.sampling())
    @rule()
    def admit(self) -> None:
        deadline = len(self.model.consumed) + STALENESS
        (group,) = self.run(self.story.admit(deadline=deadline, admitted=self.model.newest()))
        made = [ModelRollout(rollout.id) for rollout in group.rollouts]
        self.model.groups[group.id] = ModelGroup(made, deadline=deadline, admitted=self.model.newest())

    @precondition(lambda self: self.model.sampling())
    @rule()
    def complete_one(self) -> None:
        """The whole way at once, or random walks would hardly ever reach a step."""
        deadline, newest = len(self.model.consumed) + STALENESS, self.model.newest()
        group = self.run(self.story.ready_group(deadline=deadline, admitted=newest))
        made = [ModelRollout(r.id, RolloutState.SCORED, r.n_tokens) for r in group.rollouts]
        self.model.groups[group.id] = ModelGroup(made, deadline=deadline, admitted=newest, state=GroupState.READY)
        self.model.committed += sum(rollout.tokens for rollout in made)

    @precondition(lambda self: self.model.of(RolloutState.PENDING, RolloutState.PARTIAL))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        _, rollout = data.draw(st.sampled_from(self.model.of(RolloutState.PENDING, RolloutState.PARTIAL)))
        self.run(rollouts.start_rollout(self.db, rollout.id, self.story.epoch))
        rollout.state = RolloutState.GENERATING

    @precondition(lambda self: self.model.sampling() and self.model.of(RolloutState.GENERATING))
    @rule(data=st.data(), n=st.integers(1, 5), finish=st.sampled_from([None, None, "stop", "length"]))
    def append(self, data: st.DataObject, n: int, finish: str | None) -> None:
        _, rollout = data.draw(st.sampled_from(self.model.of(RolloutState.GENERATING)))
        for expected in (True, False):  # every request is sent twice
            sent = self.story.append(rollout.id, rollout.tokens, n, finish=finish)
            assert self.run(sent) is expected
        rollout.tokens += n
        self.model.committed += n
        if finish is not None:
            rollout.state = RolloutState.FINISHED

    @precondition(lambda self: self.model.of(RolloutState.GENERATING))
    @rule(data=st.data(), gap=st.integers(1, 3))
    def gap(self, data: st.DataObject, gap: int) -> None:
        _, rollout = data.draw(st.sampled_from(self.model.of(RolloutState.GENERATING)))
        self.refused(self.story.append(rollout.id, rollout.tokens + gap, 2))

    @precondition(lambda self: self.model.of(RolloutState.FINISHED))
    @rule(data=st.data(), fails=st.booleans())
    def score(self, data: st.DataObject, fails: bool) -> None:
        group_id, rollout = data.draw(st.sampled_from(self.model.of(RolloutState.FINISHED)))
        call: Callable[[], Coroutine[Any, Any, GroupState]] = (
            (lambda: rollouts.fail_rollout(self.db, rollout.id, "died", min_scored=1))
            if fails
            else (lambda: rollouts.score_rollout(self.db, rollout.id, {}, 0.5, "text", min_scored=1))
        )
        rollout.state = RolloutState.FAILED if fails else RolloutState.SCORED
        group = self.model.groups[group_id]
        settled = [r.state for r in group.rollouts if r.state in {RolloutState.SCORED, RolloutState.FAILED}]
        if group.state is GroupState.OPEN and len(settled) == K:
            group.state = GroupState.READY if RolloutState.SCORED in settled else GroupState.DROPPED
        assert [self.run(call()) for _ in range(2)] == [group.state] * 2

    @precondition(lambda self: self.model.ready())
    @rule()
    def record(self) -> None:
        if self.model.recorded:  # one at a time, as the pipeline does it
            return
        group_id = self.model.ready()[0]
        group = self.run(groups.group(self.db, group_id))
        new = self.run(self.story.new_step(group))
        one, two = (self.run(steps.record_step(self.db, self.story.id, new)) for _ in range(2))
        assert one == two
        self.model.groups[group_id].state = GroupState.RESERVED
        self.model.recorded.append(group_id)

    @precondition(lambda self: self.model.recorded)
    @rule()
    def apply(self) -> None:
        step = self.run(steps.recorded(self.db, self.story.id))
        assert step.groups == (self.model.recorded[0],)
        one, two = (self.run(self.story.apply(step)) for _ in range(2))
        assert one == two
        group_id = self.model.recorded.pop(0)
        self.model.groups[group_id].state = GroupState.CONSUMED
        self.model.consumed.append(group_id)
        self.model.peak = max(self.model.peak, len(self.model.consumed))

    @precondition(lambda self: self.model.consumed)
    @rule(data=st.data())
    def diverge(self, data: st.DataObject) -> None:
        """A replay starts from the newest checkpoint, so it diverges after it."""
        first = max(self.model.saved, default=0) + 1
        if first > len(self.model.consumed):
            return
        n = data.draw(st.integers(first, len(self.model.consumed)))
        self.run(replay.void_from(self.db, self.story.id, n, NUMERICS, {}))
        taken = self.model.consumed[n - 1 :]
        del self.model.consumed[n - 1 :]
        self.model.recorded = taken + self.model.recorded
        for group_id in taken:
            self.model.groups[group_id].state = GroupState.RESERVED

    @precondition(lambda self: len(self.model.consumed) > max(self.model.saved, default=0))
    @rule()
    def save(self) -> None:
        version = self.run(self.story.version())
        row = self.run(checkpoints.begin(self.db, self.story.id, version.id, f"/c/{version.id}"))
        self.run(checkpoints.commit(self.db, row.id, "sha", 1))
        self.model.saved.append(len(self.model.consumed))

    @rule()
    def prune_and_collect(self) -> None:
        for old in self.run(checkpoints.prune(self.db, self.story.id, KEEP)):
            self.run(checkpoints.forget(self.db, old.id))
        del self.model.saved[:-KEEP]
        self.run(checkpoints.collect_rollouts(self.db, self.story.id, KEEP))
        if len(self.model.saved) == KEEP:
            self.model.collected |= set(self.model.consumed[: self.model.saved[0]])
            self.model.collected |= self.dropped_before(self.model.saved[0])

    def dropped_before(self, horizon: int) -> set[int]:
        busy = {group_id for group_id, _ in self.model.of(RolloutState.GENERATING)}
        dropped = {g for g, group in self.model.groups.items() if group.state is GroupState.DROPPED}
        return {g for g in dropped - busy if self.model.groups[g].admitted <= horizon}

    @precondition(lambda self: any(g.state in {GroupState.OPEN, GroupState.READY} for g in self.model.groups.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        live = [i for i, g in self.model.groups.items() if g.state in {GroupState.OPEN, GroupState.READY}]
        group_id = data.draw(st.sampled_from(live))
        self.run(groups.drop_group(self.db, group_id, "its deadline has passed"))
        self.model.groups[group_id].state = GroupState.DROPPED
        self.refused(groups.drop_group(self.db, group_id, "again"))

    def refused(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            self.run(call)
        except StateError:
            return
        raise AssertionError("the store accepted what it must refuse")

    # --- what must be equal

    @invariant()
    def progress_is_the_models(self) -> None:
        found = self.run(progress.progress(self.db, self.story.id))
        applied, waiting = len(self.model.consumed), len(self.model.recorded)
        assert (found.applied, found.planned) == (applied, applied + waiting)
        assert found.recorded == (applied + 1 if waiting else None)
        assert found.saved == max(self.model.saved, default=0)
        assert self.run(chunks.tokens_committed(self.db, self.story.id)) == self.model.committed

    @invariant()
    def rows_are_the_models(self) -> None:
        found = self.run(groups.groups(self.db, list(self.model.groups)))
        for stored in found:
            expected = self.model.groups[stored.id]
            assert stored.state is expected.state
            kept = [] if stored.id in self.model.collected else expected.rollouts
            assert [(r.id, r.state, r.n_tokens) for r in stored.rollouts] == [(r.id, r.state, r.tokens) for r in kept]


Histories.TestCase.settings = settings(
    max_examples=15, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestHistories = Histories.TestCase
