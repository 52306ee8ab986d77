"""How the rollouts of a step are laid out for the learner: whole groups into minibatches, lengths into micro-batches.

    groups of the step --seeded permutation--> minibatches (one optimiser step each, as even as possible)
    a minibatch --sorted by length--> micro-batches (one forward each, padded to its longest, within a token budget)

The layout is recorded with the step before it is learned: in bf16 another split moves the gradient by 1e-2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhfd.core.order import row_of
from rlhfd.core.types import Ordinal, RolloutId

SKIPPED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sized:
    """A rollout as the layout sees it. `length`: prompt and completion, tokens; `skipped`: it is not forwarded."""

    id: RolloutId
    group: Ordinal
    length: int
    skipped: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rollout is trained; `micro_batch` counts inside its minibatch and is -1 for a skipped one."""

    minibatch: int
    micro_batch: int


def layout(
    rollouts: Sequence[Sized], *, minibatches: int, tokens_per_micro_batch: int, seed: int
) -> dict[RolloutId, Place]:
    """The place of every rollout, in the order given; a pure function of the set of rollouts and the seed.

    A group never spans two minibatches and their numbers of groups differ by at most one. In a micro-batch the longest
    rollout times their number is at most `tokens_per_micro_batch`; one rollout longer than that has one of its own.
    Raises ValueError where a minibatch would be empty and for an id that comes twice.
    """
    minibatch_of = _deal(sorted({rollout.group for rollout in rollouts}), minibatches, seed)
    members: list[list[Sized]] = [[] for _ in range(minibatches)]
    for rollout in rollouts:
        members[minibatch_of[rollout.group]].append(rollout)
    placed: dict[RolloutId, Place] = {}
    for number, minibatch in enumerate(members):
        for rollout, micro_batch in _cut(minibatch, tokens_per_micro_batch):
            placed[rollout.id] = Place(minibatch=number, micro_batch=micro_batch)
    if len(placed) != len(rollouts):
        raise ValueError("a rollout comes twice in one step")
    return {rollout.id: placed[rollout.id] for rollout in rollouts}


def _deal(groups: Sequence[Ordinal], minibatches: int, seed: int) -> dict[Ordinal, int]:
    """Group -> minibatch: the permuted groups cut into `minibatches` runs of nearly equal length."""
    if not 1 <= minibatches <= len(groups):
        raise ValueError(f"{len(groups)} groups do not fill {minibatches} minibatches")
    count = len(groups)
    return {groups[row_of(seed, place, count)]: place * minibatches // count for place in range(count)}


def _cut(minibatch: Sequence[Sized], budget: int) -> Iterator[tuple[Sized, int]]:
    """Each rollout with its micro-batch: shortest first, a new one whenever the next would not fit."""
    yield from ((rollout, SKIPPED) for rollout in minibatch if rollout.skipped)
    number, held = 0, 0
    for rollout in sorted((r for r in minibatch if not r.skipped), key=lambda r: (r.length, r.id)):
        if held and rollout.length * (held + 1) > budget:
            number, held = number + 1, 0
        held += 1
        yield rollout, number
