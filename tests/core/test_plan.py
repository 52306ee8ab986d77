"""The planner under a virtual clock: random durations, losses and restarts; real rules, no asyncio."""

import heapq
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from rlhfd.core import overlap
from rlhfd.core.plan import (
    Admit,
    EngineView,
    Finish,
    Generate,
    Hold,
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
from rlhfd.core.types import Group, GroupId, GroupState, Ordinal, Rollout, RolloutId, RolloutState, VersionStep

LONGEST = 3  # stretches of generation per rollout; each may be cut by a publication


@dataclass
class World:
    """Tables, engine and learner of one job; `plan` decides, this only does what it is told."""

    rules: Rules
    random: Random
    generations: int = 2
    clock: float = 0.0
    groups: dict[int, Group] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    versions: dict[int, set[int]] = field(default_factory=dict)
    applied: int = 0
    recorded: tuple[int, tuple[int, ...]] | None = None
    saved: int = 0
    written: int = 0
    published: int = 0
    engine_open: bool = True
    streams: set[int] = field(default_factory=set)
    busy: dict = field(default_factory=dict)
    events: list = field(default_factory=list)
    consumed: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    holds: int = 0
    learned_while_open: int = 0
    finished: bool = False

    def view(self) -> View:
        live = tuple(g for g in self.groups.values() if g.state in {GroupState.OPEN, GroupState.READY})
        return View(
            rules=self.rules,
            groups=live,
            applied=self.applied,
            recorded=None if self.recorded is None else self.recorded[0],
            planned=self.applied + (self.recorded is not None),
            saved=self.saved,
            learner=LearnerView(ready=True, written=self.written),
            engine=EngineView(open=self.engine_open, version=self.published, drained=not self.streams),
            busy=frozenset(self.busy),
        )

    def later(self, seconds: float, key, what) -> None:
        self.busy[key] = what
        heapq.heappush(self.events, (self.clock + seconds, len(self.events) + self.random.random(), key, what))

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            actions = plan(self.view())
            for action in actions:
                self.act(action)
            if self.finished:
                return
            if any(isinstance(a, Admit | Record | Hold) for a in actions):
                continue
            assert self.events, f"deadlock: {missing(self.view())}"
            self.clock, _, key, what = heapq.heappop(self.events)
            if self.busy.get(key) is what:
                del self.busy[key]
                what()
        raise AssertionError("the schedule does not end")

    def act(self, action) -> None:
        match action:
            case Finish():
                self.finished = True
            case Admit(count):
                self.admit(count)
            case Record(ordinals):
                self.record(ordinals)
            case Hold():
                self.holds += 1
                self.pause()
            case _:
                self.begin(action)

    def begin(self, action) -> None:
        """An effect that takes its time."""
        match action:
            case Generate() if self.engine_open:  # else a publication began in the same breath
                self.streams.add(action.rollout.id)
                self.later(self.random.expovariate(1.0), action.key, lambda: self.stretch(action))
            case Score():
                self.later(self.random.expovariate(4.0), action.key, lambda: self.score(action))
            case Publish():
                self.pause()
                self.later(self.random.random(), action.key, lambda: self.publish(action.step))
            case Learn():
                self.learned_while_open += self.engine_open
                self.later(self.random.expovariate(0.5), action.key, self.learn)
            case Save():
                self.later(0.1, action.key, self.save)

    def admit(self, count: int) -> None:
        for ordinal in range(len(self.groups), len(self.groups) + count):
            rollouts = tuple(
                Rollout(
                    id=RolloutId(ordinal * self.generations + k),
                    group_id=GroupId(ordinal),
                    k=k,
                    state=RolloutState.PENDING,
                )
                for k in range(self.generations)
            )
            for rollout in rollouts:
                self.left[rollout.id] = self.random.randint(1, LONGEST)
                self.versions[rollout.id] = set()
            due = overlap.deadline(VersionStep(self.published), self.rules.pace.max_staleness)
            self.groups[ordinal] = Group(
                id=GroupId(ordinal),
                ordinal=Ordinal(ordinal),
                row=0,
                deadline=due,
                state=GroupState.OPEN,
                rollouts=rollouts,
            )

    def set_rollout(self, rollout_id: int, **changes) -> None:
        ordinal = rollout_id // self.generations
        group = self.groups[ordinal]
        rollouts = tuple(replace(r, **changes) if r.id == rollout_id else r for r in group.rollouts)
        self.groups[ordinal] = replace(group, rollouts=rollouts)

    def stretch(self, action: Generate) -> None:
        rollout = action.rollout.id
        self.streams.discard(rollout)
        self.versions[rollout].add(self.published)
        self.left[rollout] -= 1
        state = RolloutState.FINISHED if self.left[rollout] == 0 else RolloutState.PARTIAL
        self.set_rollout(rollout, state=state)

    def score(self, action: Score) -> None:
        failed = self.random.random() < 0.05
        self.set_rollout(action.rollout.id, state=RolloutState.FAILED if failed else RolloutState.SCORED, reward=1.0)
        ordinal = action.rollout.id // self.generations
        group = self.groups[ordinal]
        if all(r.state in {RolloutState.SCORED, RolloutState.FAILED} for r in group.rollouts):
            enough = sum(r.state is RolloutState.SCORED for r in group.rollouts) >= 2
            self.groups[ordinal] = replace(group, state=GroupState.READY if enough else GroupState.DROPPED)
            if not enough:
                self.dropped.append(ordinal)

    def record(self, ordinals) -> None:
        assert self.recorded is None
        step = self.applied + 1
        for ordinal in ordinals:
            group = self.groups[ordinal]
            assert group.state is GroupState.READY
            self.groups[ordinal] = replace(group, state=GroupState.RESERVED)
            for rollout in group.rollouts:
                oldest = min(self.versions[rollout.id])
                assert self.applied - oldest <= self.rules.pace.max_staleness
        self.recorded = (step, tuple(ordinals))

    def learn(self) -> None:
        step, ordinals = self.recorded
        for ordinal in ordinals:
            self.groups[ordinal] = replace(self.groups[ordinal], state=GroupState.CONSUMED)
        self.consumed += ordinals
        self.applied, self.recorded = step, None
        self.written = step

    def save(self) -> None:
        self.saved = self.applied

    def pause(self) -> None:
        """Every stream ends at once with what it has: tokens of the version still served."""
        self.engine_open = False
        for rollout in list(self.streams):
            self.busy.pop(("generate", rollout))
            self.streams.discard(rollout)
            self.versions[rollout].add(self.published)
            self.set_rollout(rollout, state=RolloutState.PARTIAL)

    def publish(self, step: int) -> None:
        assert step >= self.published, "the generator's version went back"
        self.published, self.engine_open = step, True

    def crash(self) -> None:
        """kill -9 of everything, and the recovery's view: what was in flight is partial, nothing is running."""
        self.busy.clear()
        self.events.clear()
        self.streams.clear()
        self.written, self.published, self.engine_open = self.applied, max(self.published, self.applied), True


def rules(*, staleness: int, overcommit: int, together: bool, order: str = "first_complete") -> Rules:
    pace = overlap.Pace(
        groups_per_step=3,
        max_staleness=staleness,
        overcommit=overlap.cut_overcommit(overcommit, 3, staleness),
        max_steps=9,
        batch_order=order,
    )
    return Rules(pace=pace, together=together, save_steps=4, max_streams=5)


MODES = [
    pytest.param(0, 0, True, id="synchronous"),
    pytest.param(1, 2, True, id="one behind"),
    pytest.param(4, 2, True, id="A-3PO"),
    pytest.param(1, 3, False, id="OPPO's own: no generation while the learner works"),
    pytest.param(0, 0, False, id="synchronous on a shared device"),
    pytest.param(3, 2, False, id="shared device"),
]


@pytest.mark.parametrize("order", ["first_complete", "fifo"])
@pytest.mark.parametrize(("staleness", "overcommit", "together"), MODES)
def test_every_schedule_ends_with_every_group_used_once_and_none_too_stale(staleness, overcommit, together, order):
    for seed in range(25):
        world = World(rules(staleness=staleness, overcommit=overcommit, together=together, order=order), Random(seed))
        world.run()
        assert world.applied == world.saved == world.rules.pace.max_steps
        assert sorted(world.consumed + world.dropped) == list(range(len(world.groups)))
        assert len(world.consumed) == world.rules.pace.groups_per_step * world.rules.pace.max_steps


@pytest.mark.parametrize(("staleness", "overcommit", "together"), MODES)
def test_a_crash_at_any_moment_changes_none_of_that(staleness, overcommit, together):
    for seed in range(20):
        random = Random(seed)
        world = World(rules(staleness=staleness, overcommit=overcommit, together=together), random)
        for _ in range(4):
            try:
                world.run(limit=random.randint(1, 80))
            except AssertionError as error:
                if "does not end" not in str(error):
                    raise
            if world.finished:
                break
            world.crash()
        world.run()
        assert sorted(world.consumed + world.dropped) == list(range(len(world.groups)))
        assert world.applied == world.saved == world.rules.pace.max_steps


def test_where_roles_take_turns_nothing_is_generated_while_the_learner_works():
    world = World(rules(staleness=1, overcommit=3, together=False), Random(3))
    world.run()
    assert world.learned_while_open == 0
    assert world.holds >= world.rules.pace.max_steps


def test_with_overlap_the_learner_works_while_the_gate_is_open():
    world = World(rules(staleness=4, overcommit=2, together=True), Random(3))
    world.run()
    assert world.holds == 0
    assert world.learned_while_open > 0


def test_a_save_that_is_due_comes_before_the_next_step():
    view = View(
        rules=rules(staleness=4, overcommit=2, together=True),
        groups=(),
        applied=4,
        recorded=5,
        planned=5,
        saved=0,
        learner=LearnerView(ready=True, written=4),
        engine=EngineView(open=False, version=4, drained=True),
        busy=frozenset(),
    )
    assert Save(4) in plan(view)
    assert not any(isinstance(action, Learn) for action in plan(view))
    assert Learn(5) in plan(replace(view, saved=4))


def test_an_engine_that_is_not_in_service_gets_neither_rollouts_nor_publications():
    world = World(rules(staleness=4, overcommit=2, together=True), Random(0))
    world.admit(3)
    view = replace(
        world.view(), engine=EngineView(open=False, version=0, drained=True), busy=frozenset({("publish", 0)})
    )
    assert plan(view) == []
    assert missing(view) == "0/3 groups complete, 6 rollouts in generation"


def test_after_a_diverged_replay_nothing_is_sampled_below_the_newest_version_that_there_had_been():
    world = World(rules(staleness=4, overcommit=2, together=True), Random(0))
    world.admit(3)
    view = replace(world.view(), engine=EngineView(open=True, version=2, drained=True, floor=3))
    assert plan(view) == []
    assert any(
        isinstance(action, Admit | Generate) for action in plan(replace(view, engine=replace(view.engine, version=3)))
    )


def test_taking_turns_an_engine_that_came_up_open_while_the_learner_worked_still_gets_its_publication():
    """Else nothing would be admitted, for the engine is behind, and nothing published, for it is not held."""
    world = World(rules(staleness=1, overcommit=1, together=False), Random(0))
    view = replace(
        world.view(),
        applied=1,
        planned=1,
        saved=1,
        learner=LearnerView(ready=True, written=1),
        engine=EngineView(open=True, version=0, drained=True),
    )
    assert plan(view) == [Publish(1)]
    assert plan(replace(view, busy=frozenset({("publish", 0)}))) == []
