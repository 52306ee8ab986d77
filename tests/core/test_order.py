"""The prompt of an ordinal and the seed of a request are pure functions that must never change."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfd.core.order import request_seed, row_of

PINNED_ROWS = [8, 2, 6, 3, 4, 0, 7, 5, 9, 1, 0, 9, 4, 8, 7, 2, 5, 1, 3, 6]
PINNED_FAR_ROW = 679471
PINNED_SEEDS = [1752163630, 1911524237]
SEEDS = st.integers(-(2**63), 2**63)


@settings(max_examples=60)
@given(seed=SEEDS, epoch=st.integers(0, 1000), rows=st.integers(1, 2000))
def test_an_epoch_visits_every_row_once(seed, epoch, rows):
    visited = sorted(row_of(seed, epoch * rows + place, rows) for place in range(rows))
    assert visited == list(range(rows))


@pytest.mark.parametrize("rows", [*range(1, 70), 255, 256, 257, 1023, 1024, 1025, 2000])
def test_an_epoch_visits_every_row_once_at_every_small_size_and_around_the_powers(rows):
    assert sorted(row_of(7, 3 * rows + place, rows) for place in range(rows)) == list(range(rows))


@given(seed=SEEDS, rows=st.integers(50, 300))
@settings(max_examples=30)
def test_epochs_and_seeds_differ_in_order(seed, rows):
    epochs = [tuple(row_of(seed, epoch * rows + place, rows) for place in range(rows)) for epoch in range(3)]
    other = tuple(row_of(seed + 1, place, rows) for place in range(rows))
    assert len({*epochs, other, tuple(range(rows))}) == 5


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_every_order_of_a_few_rows_comes_about_equally_often(rows):
    epochs = 2400
    orders = Counter(tuple(row_of(11, e * rows + p, rows) for p in range(rows)) for e in range(epochs))
    possible = {2: 2, 3: 6, 4: 24, 5: 120}[rows]
    chi_square = sum((n - epochs / possible) ** 2 for n in orders.values()) / (epochs / possible)
    assert len(orders) == possible
    assert chi_square < possible + 5 * (2 * possible) ** 0.5


def test_the_place_in_an_epoch_says_nothing_of_the_row():
    rows, epochs = 100, 200
    firsts = Counter(row_of(5, epoch * rows, rows) for epoch in range(epochs))
    assert len(firsts) > 75
    assert max(firsts.values()) < 12


def test_the_order_never_changes_between_releases():
    assert [row_of(42, ordinal, 10) for ordinal in range(20)] == PINNED_ROWS
    assert row_of(42, 123_456_789, 1_000_003) == PINNED_FAR_ROW


@pytest.mark.parametrize(("ordinal", "rows"), [(0, 0), (-1, 5), (0, -3)])
def test_no_row_for_nonsense(ordinal, rows):
    with pytest.raises(ValueError, match="no row for ordinal"):
        row_of(1, ordinal, rows)


def test_a_seed_differs_whenever_anything_of_the_request_does():
    seeds = {request_seed(s, o, k, t) for s in range(3) for o in range(20) for k in range(8) for t in (0, 1, 64)}
    assert len(seeds) == 3 * 20 * 8 * 3
    assert request_seed(1, 11, 1, 0) != request_seed(11, 1, 1, 0) != request_seed(1, 1, 11, 0)


@given(SEEDS, st.integers(0, 2**40), st.integers(0, 2**20), st.integers(0, 2**30))
def test_a_request_seed_fits_31_bits_and_is_stable(job_seed, ordinal, k, tokens_so_far):
    seed = request_seed(job_seed, ordinal, k, tokens_so_far)
    assert 0 <= seed < 2**31
    assert seed == request_seed(job_seed, ordinal, k, tokens_so_far)


def test_request_seeds_spread_over_the_whole_range():
    seeds = [request_seed(1, ordinal, 0, 0) for ordinal in range(2000)]
    assert min(seeds) < 2**31 / 100
    assert max(seeds) > 2**31 * 0.99
    assert abs(sum(seed & 1 for seed in seeds) - 1000) < 120


def test_request_seeds_never_change_between_releases():
    assert [request_seed(42, 7, 3, 0), request_seed(42, 7, 3, 64)] == PINNED_SEEDS
