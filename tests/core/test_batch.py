"""The layout keeps groups whole, minibatches even and micro-batches within their budget."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.core.batch import Place, Sized, layout
from rlhfd.core.types import Ordinal, RolloutId


def sized(number: int, group: int, length: int, *, skipped: bool = False) -> Sized:
    return Sized(id=RolloutId(number), group=Ordinal(group), length=length, skipped=skipped)


@st.composite
def steps(draw):
    """A step's rollouts with ids in no order, minibatches that its groups can fill, a budget and a seed."""
    count = draw(st.integers(1, 12))
    ordinals = draw(st.lists(st.integers(0, 500), min_size=count, max_size=count, unique=True))
    sizes = draw(st.lists(st.integers(1, 6), min_size=count, max_size=count))
    groups = [ordinal for ordinal, size in zip(ordinals, sizes, strict=True) for _ in range(size)]
    ids = draw(st.permutations(range(len(groups))))
    lengths = draw(st.lists(st.integers(1, 300), min_size=len(ids), max_size=len(ids)))
    skipped = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    rows = zip(ids, groups, lengths, skipped, strict=True)
    rollouts = [sized(i, g, n, skipped=s) for i, g, n, s in rows]
    return rollouts, draw(st.integers(1, count)), draw(st.integers(1, 1000)), draw(st.integers(0, 2**31))


def lay_out(step) -> tuple[list[Sized], dict[RolloutId, Place]]:
    rollouts, minibatches, budget, seed = step
    return rollouts, layout(rollouts, minibatches=minibatches, tokens_per_micro_batch=budget, seed=seed)


@given(steps())
def test_every_rollout_has_one_place_in_the_order_given(step):
    rollouts, places = lay_out(step)
    assert list(places) == [rollout.id for rollout in rollouts]


@given(steps())
def test_a_group_stays_whole_and_minibatches_are_even(step):
    rollouts, places = lay_out(step)
    minibatches = {r.group: {places[o.id].minibatch for o in rollouts if o.group == r.group} for r in rollouts}
    assert all(len(where) == 1 for where in minibatches.values())
    sizes = Counter(min(where) for where in minibatches.values())
    assert set(sizes) == set(range(step[1]))
    assert max(sizes.values()) - min(sizes.values()) <= 1


@given(steps())
def test_a_micro_batch_fits_the_budget_or_holds_one_rollout(step):
    rollouts, places = lay_out(step)
    members: dict[tuple[int, int], list[int]] = {}
    for rollout in rollouts:
        if not rollout.skipped:
            place = places[rollout.id]
            members.setdefault((place.minibatch, place.micro_batch), []).append(rollout.length)
    assert all(len(m) == 1 or max(m) * len(m) <= step[2] for m in members.values())
    for minibatch in range(step[1]):
        numbers = sorted(micro for where, micro in members if where == minibatch)
        assert numbers == list(range(len(numbers)))
    for (minibatch, micro), lengths in members.items():
        following = members.get((minibatch, micro + 1))
        assert following is None or min(following) * (len(lengths) + 1) > step[2]  # none ends before it must


@given(steps())
def test_only_skipped_rollouts_are_in_no_micro_batch(step):
    rollouts, places = lay_out(step)
    assert all((places[r.id].micro_batch == -1) == r.skipped for r in rollouts)


@given(steps())
def test_inside_a_minibatch_lengths_rise_and_ties_go_by_id(step):
    rollouts, places = lay_out(step)
    for minibatch in range(step[1]):
        forwarded = [r for r in rollouts if places[r.id].minibatch == minibatch and not r.skipped]
        forwarded.sort(key=lambda r: (r.length, r.id))
        micro_batches = [places[r.id].micro_batch for r in forwarded]
        assert micro_batches == sorted(micro_batches)


@given(steps(), st.randoms(use_true_random=False))
def test_the_layout_does_not_depend_on_the_order_given(step, random):
    rollouts, *rest = step
    shuffled = random.sample(rollouts, len(rollouts))
    assert lay_out((shuffled, *rest))[1] == lay_out(step)[1]


def test_skipping_moves_no_group_to_another_minibatch():
    plain = [sized(i, i // 2, 10) for i in range(16)]
    some = [sized(i, i // 2, 10, skipped=i % 3 == 0) for i in range(16)]
    settings = {"minibatches": 4, "tokens_per_micro_batch": 20, "seed": 5}
    assert [p.minibatch for p in layout(plain, **settings).values()] == [
        p.minibatch for p in layout(some, **settings).values()
    ]


def test_seeds_deal_the_groups_differently():
    rollouts = [sized(i, i, 10) for i in range(8)]
    deals = {
        tuple(p.minibatch for p in layout(rollouts, minibatches=2, tokens_per_micro_batch=80, seed=s).values())
        for s in range(40)
    }
    assert len(deals) > 20


def test_a_worked_example():
    rollouts = [sized(1, 0, 9), sized(2, 0, 3), sized(3, 1, 4), sized(4, 1, 40), sized(5, 1, 3, skipped=True)]
    places = layout(rollouts, minibatches=1, tokens_per_micro_batch=12, seed=0)
    assert [place.micro_batch for place in places.values()] == [1, 0, 0, 2, -1]


def test_equal_lengths_fill_micro_batches_to_the_budget():
    places = layout([sized(i, 0, 10) for i in range(23)], minibatches=1, tokens_per_micro_batch=50, seed=0)
    assert Counter(p.micro_batch for p in places.values()) == {0: 5, 1: 5, 2: 5, 3: 5, 4: 3}
    assert max(p.micro_batch for p in places.values()) == ceil(23 / 5) - 1


@pytest.mark.parametrize("minibatches", [0, 3])
def test_a_minibatch_without_a_group_is_refused(minibatches):
    with pytest.raises(ValueError, match=f"2 groups do not fill {minibatches} minibatches"):
        layout([sized(1, 0, 5), sized(2, 1, 5)], minibatches=minibatches, tokens_per_micro_batch=10, seed=0)


def test_a_rollout_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="comes twice"):
        layout([sized(1, 0, 5), sized(1, 0, 5)], minibatches=1, tokens_per_micro_batch=10, seed=0)
