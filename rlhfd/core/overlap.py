"""When a group may be admitted and when a step may be planned, so that staleness is bounded without deadlock (pure).

Names: V `start_version`, the version the next step starts from · v `generator_version`, the version the generator
samples with · K `max_staleness` · B `groups_per_step` · live: groups admitted and bound to no step, finished or not ·
D `deadline`, the last version that a step may train the group from.

    admit  while |live| + 1 <= min(B + overcommit, B * (v + K - V + 1)), and never more than can still be trained
    plan   the B complete groups of least (D, ordinal), if for every m >= V at most B * (m - V) other live groups have
           D <= m; else wait: the learner waits, nothing stale is dropped silently

Why it holds. Let F(V) say: for every m >= V, at most B * (m - V + 1) live groups have D <= m, and none has D < V.
Admission keeps F (the new D is v + K, and |live| stays under F's bound there; an earlier m counts the same groups as
before), a drop keeps it, and the planning test *is* F(V + 1). Every token of a group has a version >= D - K, because
the generator's version never goes back; so "no D < V" is the bound V - version <= K for every token of every step.
No deadlock: once all live groups are complete the earliest-deadline choice passes the test (F(V) counts the chosen
ones among the least), and with fewer than B live admission opens as soon as v = V, because publication never waits
for the learner. Looking one step ahead instead of at every m is not enough: it plans itself into a corner.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlhfd.core.types import Ordinal, VersionStep
from rlhfd.errors import JobFileError

BatchOrder: TypeAlias = Literal["first_complete", "fifo"]
OnStale: TypeAlias = Literal["wait", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The settings that bound a job's overlap; `overcommit` (groups) as `cut_overcommit` gave it."""

    groups_per_step: int
    max_staleness: int
    overcommit: int
    max_steps: int
    batch_order: BatchOrder = "first_complete"
    on_stale: OnStale = "wait"


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveGroup:
    """A group that no step holds yet. `complete`: every rollout finished and scored (or failed)."""

    deadline: VersionStep
    ordinal: Ordinal
    complete: bool


def deadline(generator_version: VersionStep, max_staleness: int) -> VersionStep:
    """D of a group admitted now; stored with it, so that lowering K on a running job holds for later groups only."""
    return VersionStep(generator_version + max_staleness)


def staleness(sampled: VersionStep, version: VersionStep) -> int:
    """Staleness of a token, in steps: the step's start version minus the token's own, never negative."""
    return max(version - sampled, 0)


def cut_overcommit(value: int, groups_per_step: int, max_staleness: int) -> int:
    """The overcommit in force, groups: at most B * K, since more could never be trained in time.

    Raises JobFileError for a number > 0 with `max_staleness = 0` (nothing may be carried over) and for one < 0.
    """
    if value < 0:
        raise JobFileError(f"rollout.overcommit = {value} is negative; give 0 or more groups")
    if value > 0 and max_staleness == 0:
        raise JobFileError(
            f"rollout.overcommit = {value} carries groups over into later steps, which rollout.max_staleness = 0 "
            "forbids; set overcommit = 0 or max_staleness to 1 or more"
        )
    return min(value, groups_per_step * max_staleness)


def admissible(live: int, pace: Pace, *, generator_version: VersionStep, start_version: VersionStep) -> int:
    """How many ordinals may be admitted now, beside `live` groups. Slots go to the least (D, ordinal) first.

    The last term is the end of the run: every admitted group is trained or dropped by step `max_steps`.
    """
    steps_in_reach = generator_version + pace.max_staleness - start_version + 1
    steps_left = pace.max_steps - start_version
    room = min(
        pace.groups_per_step + pace.overcommit, pace.groups_per_step * steps_in_reach, pace.groups_per_step * steps_left
    )
    return max(room - live, 0)


def can_admit(live: int, pace: Pace, *, generator_version: VersionStep, start_version: VersionStep) -> bool:
    """Whether the next ordinal may be admitted now."""
    return admissible(live, pace, generator_version=generator_version, start_version=start_version) > 0


def choose_step(live: Iterable[LiveGroup], pace: Pace, *, start_version: VersionStep) -> list[Ordinal] | None:
    """The B groups of the next step, by (D, ordinal), or None: wait.

    `first_complete` takes them from the complete groups. `fifo` takes the first B of all and waits for them, so
    batches are the same whatever the timing; deadlines rise with ordinals, so these are the lowest ordinals (only
    after K was lowered on a running job does a later group with a nearer deadline go first).
    With `on_stale = "drop"` nothing waits for the groups left behind; those `overdue` are never chosen.
    """
    ordered = sorted(live, key=lambda group: (group.deadline, group.ordinal))
    if pace.on_stale == "drop":
        ordered = [group for group in ordered if group.deadline >= start_version]
    pool = ordered if pace.batch_order == "fifo" else [group for group in ordered if group.complete]
    chosen = pool[: pace.groups_per_step]
    if len(chosen) < pace.groups_per_step or not all(group.complete for group in chosen):
        return None
    ordinals = [group.ordinal for group in chosen]
    rest = [group.deadline for group in ordered if group.ordinal not in ordinals]
    waits = pace.on_stale == "wait" and not _feasible(rest, pace.groups_per_step, start_version)
    return None if waits else ordinals


def _feasible(deadlines: list[VersionStep], groups_per_step: int, start_version: VersionStep) -> bool:
    """F(V + 1) over the groups left behind, their deadlines ascending: each can still be trained in time."""
    return all(place < groups_per_step * (due - start_version) for place, due in enumerate(deadlines))


def overdue(live: Iterable[LiveGroup], *, start_version: VersionStep) -> list[Ordinal]:
    """Live groups with D < V, which no step may train any more: to drop, and count, with `on_stale = "drop"`.

    With "wait" there are none, by F; one that shows up all the same is a bug, and must not be trained either.
    """
    return [group.ordinal for group in live if group.deadline < start_version]
