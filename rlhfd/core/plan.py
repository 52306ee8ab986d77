"""plan(view) -> actions: the one place that decides what a job does next.

    tables ──load──► View ──plan──► [Admit, Record, Generate, Score, Learn, Publish, Save, Finish]
                       ▲                              │ effects (pipeline/) run as tasks,
                       └────────── COMMIT ◄───────────┘ each ends in one transaction

Pure: no await, no clock, no SQLite. Starting after a crash is the same path: load the view, plan, act.

Guarantees held here (design invariants): 3 consumed once (a recorded step owns its groups), 4 staleness bounded at
consumption (`overlap.choose_step` is the planning test, `overlap.admissible` the admission rule), 7 resume is a query.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rlhfd.core import overlap
from rlhfd.core.types import Group, GroupState, Ordinal, Rollout, RolloutState, VersionStep


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the job file fixes. `max_streams`: requests the engine takes at once; the rest in steps."""

    pace: overlap.Pace
    together: bool  # generation goes on while the learner works (overlap_learning, and no shared device)
    save_steps: int
    max_streams: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerView:
    """`ready`: replayed and waiting for a call. `written`: version whose publication lies ready for the engine."""

    ready: bool
    written: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineView:
    """`open`: requests are let through. `version`: what it runs; never goes back. `drained`: no stream is in flight.

    `floor`: after a diverged replay the newest version that there had been: nothing is sampled below it, or tokens of
    one rollout would get older as it grows.
    """

    open: bool
    version: int
    drained: bool
    floor: int = 0

    @property
    def samples(self) -> bool:
        """Rollouts may be admitted and generated."""
        return self.open and self.version >= self.floor


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Everything a decision depends on. `groups`: live ones (bound to no step); `busy`: keys of actions under way."""

    rules: Rules
    groups: tuple[Group, ...]
    applied: int
    recorded: int | None  # the step to be learned next; after a diverged replay others wait behind it
    planned: int  # the newest recorded or applied step
    saved: int
    learner: LearnerView
    engine: EngineView
    busy: frozenset["Key"]

    @property
    def start_version(self) -> int:
        """V: the version that the next step to be recorded starts from."""
        return self.planned

    @property
    def learning(self) -> bool:
        """The learner is in a call."""
        return bool(self.busy & {("learn", 0), ("save", 0)})


@dataclass(frozen=True, slots=True)
class Admit:
    """Take the next `count` ordinals, with deadline v + max_staleness."""

    count: int


@dataclass(frozen=True, slots=True)
class Record:
    """Write the next step into the redo log, over these groups in this order."""

    ordinals: tuple[Ordinal, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """Stream one rollout from where it stands."""

    rollout: Rollout
    group: Group

    @property
    def key(self) -> "Key":
        """One task a rollout."""
        return ("generate", self.rollout.id)


@dataclass(frozen=True, slots=True)
class Score:
    """Ask every reward for one finished rollout."""

    rollout: Rollout
    group: Group

    @property
    def key(self) -> "Key":
        """One task a rollout."""
        return ("score", self.rollout.id)


@dataclass(frozen=True, slots=True)
class Hold:
    """Close the gate and pause the engine: the learner needs the quiet (overlap_learning = false, shared device)."""

    key: "Key" = ("publish", 0)


@dataclass(frozen=True, slots=True)
class Learn:
    """Learn the recorded step, apply it, write its publication."""

    step: int
    key: "Key" = ("learn", 0)


@dataclass(frozen=True, slots=True)
class Publish:
    """Load the written publication into the engine and check it (invariant 6); opens the gate."""

    step: int
    key: "Key" = ("publish", 0)


@dataclass(frozen=True, slots=True)
class Save:
    """Checkpoint the learner, which stands at this step."""

    step: int
    key: "Key" = ("save", 0)


@dataclass(frozen=True, slots=True)
class Finish:
    """All steps are applied and the last one is checkpointed."""


Key: TypeAlias = tuple[str, int]
Effect: TypeAlias = Generate | Score | Hold | Learn | Publish | Save
Action: TypeAlias = Admit | Record | Finish | Effect


def plan(view: View) -> list[Action]:
    """What to do now. Table changes (Admit, Record, Finish) come alone: they change the view, so it is planned anew."""
    rules = view.rules
    if view.applied == rules.pace.max_steps and view.saved == rules.pace.max_steps:
        return [Finish()]
    ordinals = _next_step(view)
    if ordinals is not None:
        return [Record(tuple(sorted(ordinals)))]
    count = _admissible(view)
    if count > 0:
        return [Admit(count)]
    return [*_learner_actions(view), *_scores(view), *_generations(view)]


def complete(group: Group) -> bool:
    """Every rollout is scored or failed, and enough are scored."""
    return group.state is GroupState.READY


def _next_step(view: View) -> list[Ordinal] | None:
    if view.recorded is not None or not view.learner.ready or view.applied >= view.rules.pace.max_steps:
        return None
    live = [overlap.LiveGroup(deadline=g.deadline, ordinal=g.ordinal, complete=complete(g)) for g in view.groups]
    return overlap.choose_step(live, view.rules.pace, start_version=VersionStep(view.start_version))


def _admissible(view: View) -> int:
    rules = view.rules
    if not view.engine.samples or not (rules.together or _quiet(view)):
        return 0
    return overlap.admissible(
        len(view.groups),
        rules.pace,
        generator_version=VersionStep(view.engine.version),
        start_version=VersionStep(view.start_version),
    )


def _quiet(view: View) -> bool:
    """Nothing is to be learned, saved or published: the engine has the machine."""
    due = view.recorded is not None or _save_due(view)
    return not due and not view.learning and view.learner.written <= view.engine.version


def _save_due(view: View) -> bool:
    rules = view.rules
    due = view.applied > 0 and (view.applied % rules.save_steps == 0 or view.applied == rules.pace.max_steps)
    return due and view.saved < view.applied


def _learner_actions(view: View) -> Iterator[Action]:
    """Save before the next step is learned; publish beside it or, where they take turns, after it."""
    rules, publishing = view.rules, ("publish", 0) in view.busy
    due = _save_due(view) or view.recorded is not None
    if view.learner.ready and not view.learning and due:
        if not rules.together and (view.engine.open or publishing or not view.engine.drained):
            if not publishing:
                yield Hold()
            return
        yield Save(view.applied) if _save_due(view) or view.recorded is None else Learn(view.recorded)
    if publishing or view.applied >= rules.pace.max_steps:
        return
    new = view.learner.written > view.engine.version  # an engine that came up while the learner worked is open, too
    if new if rules.together else not (due or view.learning) and (new or not view.engine.open):
        yield Publish(view.learner.written)


def _scores(view: View) -> Iterator[Action]:
    for group in view.groups:
        for rollout in group.rollouts:
            if rollout.state is RolloutState.FINISHED and ("score", rollout.id) not in view.busy:
                yield Score(rollout, group)


def _generations(view: View) -> Iterator[Action]:
    """Least deadline first, as many as the engine takes at once."""
    if not view.engine.samples:
        return
    room = view.rules.max_streams - sum(1 for kind, _ in view.busy if kind == "generate")
    waiting = {RolloutState.PENDING, RolloutState.PARTIAL, RolloutState.GENERATING}
    for group in sorted(view.groups, key=lambda g: (g.deadline, g.ordinal)):
        for rollout in group.rollouts:
            if room <= 0:
                return
            if rollout.state in waiting and ("generate", rollout.id) not in view.busy:
                room -= 1
                yield Generate(rollout, group)


def missing(view: View) -> str:
    """What the next step waits for, in words, for `status` and for deadlines."""
    if view.recorded is not None:
        return f"the learner, step {view.recorded}"
    done = sum(complete(g) for g in view.groups)
    left = sum(
        r.state in {RolloutState.PENDING, RolloutState.PARTIAL, RolloutState.GENERATING} for r in _rollouts(view)
    )
    return f"{done}/{view.rules.pace.groups_per_step} groups complete, {left} rollouts in generation"


def _rollouts(view: View) -> Iterator[Rollout]:
    for group in view.groups:
        yield from group.rollouts
