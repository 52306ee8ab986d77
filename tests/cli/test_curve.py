"""The curve of the rewards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.cli.curve import BLANK, curve, fitted


def test_nothing_draws_nothing():
    assert curve([]) == []


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right():
    lines = curve([0.0, 1.0], width=4, height=2)
    assert [line[:7] for line in lines] == ["1.000 ┤", "0.000 ┤"]
    upper, lower = (line[7:] for line in lines)
    assert upper[0] == chr(BLANK) != upper[-1]
    assert lower[-1] == chr(BLANK) != lower[0]


def test_a_flat_line_is_labelled_once():
    lines = curve([0.5, 0.5], width=4, height=3)
    assert sum("0.500" in line for line in lines) == 1


def test_many_values_are_averaged():
    assert fitted([0.0, 1.0, 4.0, 6.0], 2) == [0.5, 5.0]


def test_few_values_are_joined_by_lines():
    assert fitted([0.0, 1.0], 3) == [0.0, 0.5, 1.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 80), st.integers(1, 12))
def test_every_size_is_kept_and_every_column_has_a_dot(values, width, height):
    lines = curve(values, width=width, height=height)
    assert len(lines) == height
    drawn = [line.partition("┤")[2] for line in lines]
    assert {len(line) for line in drawn} == {width}
    assert all(any(line[column] != chr(BLANK) for line in drawn) for column in range(width))


@pytest.mark.parametrize("n", [4, 7, 40])
def test_the_ends_are_kept(n):
    points = fitted([1.0, 5.0, 3.0, 9.0], n)
    assert (points[0], points[-1], len(points)) == (1.0, 9.0, n)
