"""The overlap rules: stated equal to a written-out oracle, run over random schedules, and shown to be needed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfd.core.overlap import (
    LiveGroup,
    Pace,
    admissible,
    can_admit,
    choose_step,
    cut_overcommit,
    deadline,
    overdue,
    staleness,
)
from rlhfd.core.types import Ordinal, VersionStep
from rlhfd.errors import JobFileError

from .overlap_world import BrokenError, Rules, Weather, World, random_pace, random_weather

PACES = st.builds(
    Pace,
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 5),
    overcommit=st.integers(0, 12),
    max_steps=st.integers(1, 30),
)
LIVE = st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=20)


def groups(*rows: tuple[int, bool]) -> list[LiveGroup]:
    return [LiveGroup(deadline=VersionStep(d), ordinal=Ordinal(o), complete=c) for o, (d, c) in enumerate(rows)]


def pace(b: int = 1, k: int = 4, overcommit: int = 0, max_steps: int = 1000, **more) -> Pace:
    return Pace(groups_per_step=b, max_staleness=k, overcommit=overcommit, max_steps=max_steps, **more)


# --- the rules as the algorithm states them, written out -----------------------------------------------------------


def oracle_can_admit(live: int, p: Pace, v: int, start: int) -> bool:
    bound = p.groups_per_step * (v + p.max_staleness - start + 1)
    return live + 1 <= min(bound, p.groups_per_step + p.overcommit)


def oracle_choose_step(live: list[LiveGroup], b: int, start: int) -> list[int] | None:
    ready = sorted((g.deadline, g.ordinal) for g in live if g.complete)[:b]
    if len(ready) < b:
        return None
    rest = [g.deadline for g in live if (g.deadline, g.ordinal) not in ready]
    for m in range(start, max(rest, default=start) + 1):
        if sum(due <= m for due in rest) > b * (m - start):
            return None
    return None if any(due < start for due in rest) else [ordinal for _, ordinal in ready]


@given(PACES, st.integers(0, 30), st.integers(0, 10), st.integers(0, 10))
def test_admission_is_the_stated_rule_while_the_end_is_far(p, live, v, start):
    far = replace(p, max_steps=10_000)
    answer = can_admit(live, far, generator_version=VersionStep(v), start_version=VersionStep(start))
    assert answer == oracle_can_admit(live, far, v, start)


@given(PACES, st.integers(0, 30), st.integers(0, 10), st.integers(0, 10))
def test_as_many_are_admissible_as_can_be_admitted_one_by_one(p, live, v, start):
    versions = {"generator_version": VersionStep(v), "start_version": VersionStep(start)}
    one_by_one = 0
    while can_admit(live + one_by_one, p, **versions):
        one_by_one += 1
    assert admissible(live, p, **versions) == one_by_one


@given(PACES, st.integers(0, 30), st.integers(0, 10), st.integers(0, 30))
def test_no_more_is_admitted_than_can_still_be_trained(p, live, v, start):
    n = admissible(live, p, generator_version=VersionStep(v), start_version=VersionStep(start))
    assert n == 0 or live + n <= p.groups_per_step * (p.max_steps - start)


@given(LIVE, st.integers(1, 4), st.integers(0, 5))
@settings(max_examples=500)
def test_planning_is_the_stated_rule(rows, b, start):
    live = groups(*rows)
    assert choose_step(live, pace(b), start_version=VersionStep(start)) == oracle_choose_step(live, b, start)


@given(LIVE, st.integers(1, 4), st.integers(0, 5), st.randoms(use_true_random=False))
def test_planning_does_not_depend_on_the_order_of_the_groups(rows, b, start, random):
    live = groups(*rows)
    shuffled = random.sample(live, len(live))
    answers = [choose_step(x, pace(b), start_version=VersionStep(start)) for x in (live, shuffled)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        (groups((1, True), (1, True), (1, False)), None),  # two more share deadline 1: one step is left for them
        (groups((1, True), (1, True)), [0]),
        (groups((0, False), (3, True)), None),  # the straggler is due now
        (groups((2, False), (3, True)), [1]),
        (groups((3, True), (2, True)), [1]),
        (groups((3, True), (3, True)), [0]),
        (groups(), None),
    ],
)
def test_a_step_of_one_group(live, expected):
    assert choose_step(live, pace(1), start_version=VersionStep(0)) == expected


def test_fifo_waits_for_the_lowest_ordinals():
    fifo = pace(2, batch_order="fifo")
    assert choose_step(groups((4, True), (4, False), (4, True)), fifo, start_version=VersionStep(0)) is None
    assert choose_step(groups((4, True), (4, True), (4, True)), fifo, start_version=VersionStep(0)) == [0, 1]


def test_fifo_lets_a_nearer_deadline_go_first_after_max_staleness_was_lowered():
    fifo = pace(1, batch_order="fifo")
    assert choose_step(groups((5, True), (2, True)), fifo, start_version=VersionStep(2)) == [1]


def test_dropping_plans_without_waiting_and_never_takes_an_overdue_group():
    live = groups((1, True), (2, False), (2, True), (3, True))
    drop = pace(2, on_stale="drop")
    assert overdue(live, start_version=VersionStep(2)) == [0]
    assert choose_step(live, drop, start_version=VersionStep(2)) == [2, 3]
    assert choose_step(live[1:], replace(drop, on_stale="wait"), start_version=VersionStep(2)) is None


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "b", "k", "expected"), [(0, 8, 0, 0), (2, 8, 4, 2), (40, 8, 4, 32), (3, 2, 1, 2)])
def test_overcommit_is_cut_to_what_can_be_trained_in_time(value, b, k, expected):
    assert cut_overcommit(value, b, k) == expected


def test_synchronous_training_refuses_overcommit():
    with pytest.raises(JobFileError, match=r"rollout\.overcommit = 2 .* rollout\.max_staleness = 0"):
        cut_overcommit(2, 8, 0)
    with pytest.raises(JobFileError, match="negative"):
        cut_overcommit(-1, 8, 4)


@given(st.integers(0, 100), st.integers(1, 8), st.integers(0, 8))
def test_the_version_bound_never_cuts_an_overcommit_that_was_cut(value, b, k):
    if value and not k:
        return
    cut = cut_overcommit(value, b, k)
    assert b + cut <= b * (k + 1)


def test_a_deadline_is_the_last_version_within_the_bound():
    due = deadline(VersionStep(3), 4)
    assert staleness(VersionStep(3), due) == 4
    assert staleness(VersionStep(3), VersionStep(due + 1)) == 5
    assert staleness(VersionStep(5), VersionStep(3)) == 0


# --- random schedules under a virtual clock ------------------------------------------------------------------------


def test_ten_thousand_random_schedules_keep_the_bound_and_end():
    restarts = dropped = carried = 0
    for seed in range(10_000):
        random = Random(seed)
        out = World(random_pace(random), random_weather(random), random).run()
        restarts, dropped, carried = restarts + out.restarts, dropped + len(out.dropped), carried + sum(out.stale)
    assert min(restarts, dropped, carried) > 5_000  # the schedules did exercise all three


@settings(max_examples=150)
@given(
    p=PACES.map(lambda p: replace(p, overcommit=min(p.overcommit, p.groups_per_step * p.max_staleness))),
    batch_order=st.sampled_from(["first_complete", "fifo"]),
    on_stale=st.sampled_from(["wait", "drop"]),
    weather=st.builds(
        Weather,
        slots=st.integers(1, 40),
        spread=st.floats(0, 2),
        learn=st.floats(0.01, 5),
        publish=st.floats(0, 5),
        drop=st.floats(0, 0.5),
        restart=st.floats(0, 0.1),
        save_steps=st.integers(1, 4),
    ),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_keeps_the_bound_and_ends(p, batch_order, on_stale, weather, seed):
    World(replace(p, batch_order=batch_order, on_stale=on_stale), weather, Random(seed)).run()


CALM = Weather(slots=64, spread=1.0, learn=0.3, publish=0.1, drop=0.0, restart=0.0, save_steps=3)


def test_synchronous_training_is_never_stale():
    out = World(pace(4, k=0, max_steps=20), CALM, Random(1)).run()
    assert set(out.stale) == {0}


def test_fifo_trains_the_same_batches_whatever_the_timing():
    fifo = pace(3, k=2, overcommit=3, max_steps=12, batch_order="fifo")
    batches = {str(World(fifo, random_weather_without_drops(seed), Random(seed)).run().trained) for seed in range(50)}
    assert batches == {str([[3 * n, 3 * n + 1, 3 * n + 2] for n in range(12)])}


def random_weather_without_drops(seed: int) -> Weather:
    return replace(random_weather(Random(seed)), drop=0.0)


def test_mean_staleness_follows_littles_law():
    for overcommit in (0, 4, 8):
        learner_waits = replace(CALM, spread=0.3, learn=0.05, publish=0.05)
        out = World(pace(8, k=4, overcommit=overcommit, max_steps=200), learner_waits, Random(3)).run()
        assert fmean(out.stale[80:]) == pytest.approx(1 + overcommit / 8, abs=0.15)


# --- mutants: each rule is needed ----------------------------------------------------------------------------------


def chooser(feasible: Callable[[list[int], int, int], bool]) -> Rules:
    """choose_step with another planning test, over the deadlines left behind, B and V."""

    def choose(live: list[LiveGroup], p: Pace, *, start_version: VersionStep) -> list[Ordinal] | None:
        ready = sorted((g.deadline, g.ordinal) for g in live if g.complete)[: p.groups_per_step]
        taken = [ordinal for _, ordinal in ready]
        rest = sorted(g.deadline for g in live if g.ordinal not in taken)
        return taken if len(ready) == p.groups_per_step and feasible(rest, p.groups_per_step, start_version) else None

    return Rules(choose_step=choose)


def one_step_ahead(rest: list[int], b: int, start: int) -> bool:
    """Only asks whether a group left behind is due already."""
    return all(due > start for due in rest)


def two_steps_ahead(rest: list[int], b: int, start: int) -> bool:
    return one_step_ahead(rest, b, start) and sum(due <= start + 1 for due in rest) <= b


def without_the_version_bound(live: int, p: Pace, **versions: VersionStep) -> int:
    left = p.groups_per_step * (p.max_steps - versions["start_version"])
    return max(0, min(p.groups_per_step + p.overcommit, left) - live)


def without_the_end(live: int, p: Pace, **versions: VersionStep) -> int:
    return admissible(live, replace(p, max_steps=10**9), **versions)


def one_too_many(live: int, p: Pace, **versions: VersionStep) -> int:
    return admissible(live, replace(p, max_staleness=p.max_staleness + 1), **versions)


def latest_first(live: list[LiveGroup], p: Pace, *, start_version: VersionStep) -> list[Ordinal] | None:
    ready = sorted((-g.deadline, g.ordinal) for g in live if g.complete)[: p.groups_per_step]
    return [ordinal for _, ordinal in ready] if len(ready) == p.groups_per_step else None


# A learner that is always waiting, every version published at once, generations of very unequal length.
HARSH = Weather(slots=64, spread=3.0, learn=0.01, publish=0.0, drop=0.0, restart=0.0, save_steps=3)
RESTARTS = replace(HARSH, slots=4, spread=1.0, restart=0.2, save_steps=6)


def endings(rules: Rules, weather: Weather) -> Counter[str]:
    """How 100 schedules end, by what a user would see; F is not looked at."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        p = pace(4, k=4, overcommit=16, max_steps=12)
        try:
            World(p, weather, Random(seed), rules, watch_feasibility=False).run()
        except BrokenError as broken:
            seen[broken.what] += 1
        else:
            seen["well"] += 1
    return seen


@pytest.mark.parametrize("weather", [HARSH, RESTARTS], ids=["harsh", "restarts"])
def test_the_rules_end_well_where_the_mutants_are_tried(weather):
    assert endings(Rules(), weather) == {"well": 100}


MUTANTS = {
    "one_step_ahead": (chooser(one_step_ahead), "deadlock"),
    "two_steps_ahead": (chooser(two_steps_ahead), "deadlock"),
    "no_planning_test": (chooser(lambda rest, b, start: True), "bound"),
    "latest_deadline_first": (Rules(choose_step=latest_first), "bound"),
    "no_version_bound": (Rules(admissible=without_the_version_bound), "deadlock"),
    "one_version_too_many": (Rules(admissible=one_too_many), "deadlock"),
    "no_end_of_the_run": (Rules(admissible=without_the_end), "end"),
    "a_deadline_one_too_late": (Rules(deadline=lambda v, k: VersionStep(v + k + 1)), "bound"),
}


@pytest.mark.parametrize(("rules", "ending"), MUTANTS.values(), ids=MUTANTS)
def test_without_a_rule_every_schedule_breaks(rules, ending):
    assert endings(rules, HARSH) == {ending: 100}


def test_a_generator_that_goes_back_to_the_checkpoint_breaks_the_bound():
    assert endings(Rules(version_goes_back=True), RESTARTS) == {"bound": 100}
