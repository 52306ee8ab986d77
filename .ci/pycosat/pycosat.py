"""Stands in for pycosat where it can't be compiled: reasoning-gym imports it, and only its zebra puzzles call it."""

from collections.abc import Iterable, Iterator


def itersolve(clauses: Iterable[Iterable[int]]) -> Iterator[list[int]]:  # noqa: ARG001  # the real one's parameter
    """Refuse, with the way out."""
    raise RuntimeError(
        "reasoning-gym's zebra puzzles need pycosat, which is compiled: install a C compiler and Python's headers "
        "(Debian: gcc python3-dev), remove the environment and make it again"
    )
