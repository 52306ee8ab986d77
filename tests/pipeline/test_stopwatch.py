"""Where a step's time goes, on a clock that the test owns."""

import pytest

from rlhfd.core.overlap import Pace
from rlhfd.core.plan import EngineView, LearnerView, Rules, View
from rlhfd.core.types import Group, GroupId, GroupState, Ordinal, Rollout, RolloutId, RolloutState, VersionStep
from rlhfd.pipeline.stopwatch import Stopwatch, waits_for

S = RolloutState


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def view(*states: RolloutState, recorded: int | None = None, ready: bool = True, busy=frozenset()) -> View:
    rollouts = tuple(
        Rollout(id=RolloutId(k), group_id=GroupId(1), k=k, state=state, finish="stop") for k, state in enumerate(states)
    )
    one = Group(
        id=GroupId(1), ordinal=Ordinal(0), row=0, deadline=VersionStep(1), state=GroupState.OPEN, rollouts=rollouts
    )
    return View(
        rules=Rules(
            pace=Pace(groups_per_step=1, max_staleness=1, overcommit=0, max_steps=3),
            together=True,
            save_steps=1,
            max_streams=4,
        ),
        groups=(one,),
        applied=0,
        recorded=recorded,
        planned=0,
        saved=0,
        learner=LearnerView(ready=ready, written=0),
        engine=EngineView(open=True, version=0, drained=True),
        busy=busy,
    )


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (view(S.GENERATING, S.FINISHED), "wait_rollouts"),
        (view(S.PARTIAL, S.SCORED), "wait_rollouts"),
        (view(S.FINISHED, S.SCORED), "wait_scores"),
        (view(S.SCORED, S.FAILED), "wait_rollouts"),
        (view(), "wait_rollouts"),
        (view(S.GENERATING, recorded=1), "work"),
        (view(S.GENERATING, busy=frozenset({("learn", 0)})), "work"),
        (view(S.FINISHED, busy=frozenset({("save", 0)})), "work"),
        (view(S.FINISHED, busy=frozenset({("publish", 0)})), "wait_scores"),
        (view(S.GENERATING, ready=False), "work"),
    ],
)
def test_what_the_learner_waits_for(seen, phase):
    assert waits_for(seen) == phase


def test_a_lap_adds_up_its_phases_and_starts_anew():
    clock = Clock()
    watch = Stopwatch(clock)
    for seconds, phase in ((2.0, "wait_scores"), (3.0, "work"), (5.0, "wait_rollouts"), (7.0, "work")):
        clock.now += seconds
        watch.switch(phase)
    clock.now += 1.0
    assert watch.lap() == {"total": 18.0, "wait_rollouts": 9.0, "wait_scores": 3.0, "publish": 0.0}
    clock.now += 4.0
    assert watch.lap() == {"total": 4.0, "wait_rollouts": 0.0, "wait_scores": 0.0, "publish": 0.0}


def test_a_lap_in_the_middle_of_a_phase_splits_it():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 2.0
    assert watch.lap()["wait_rollouts"] == 2.0
    clock.now += 3.0
    assert watch.lap()["wait_rollouts"] == 3.0
