"""A curve in the terminal, in braille dots. Not plotext: it colours, clears and sizes the screen by itself."""

from collections.abc import Sequence
from itertools import pairwise

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # rows x columns of one braille cell
BLANK = 0x2800


def curve(values: Sequence[float], *, width: int = 60, height: int = 8) -> list[str]:
    """`height` lines of `width` cells with the range on their left; [] for no values.

    More values than dots are averaged; fewer are joined by straight lines.
    """
    if not values:
        return []
    points = fitted(values, 2 * width)
    low, high = min(points), max(points)
    rows = [_level(value, low, high, 4 * height) for value in points]
    cells = [[BLANK] * width for _ in range(height)]
    for column, (before, row) in enumerate(pairwise([rows[0], *rows])):
        for filled in range(min(before, row), max(before, row) + 1):
            cells[filled // 4][column // 2] |= DOTS[filled % 4][column % 2]
    return _labelled(["".join(map(chr, line)) for line in cells], low, high)


def fitted(values: Sequence[float], n: int) -> list[float]:
    """`n` points: means of neighbours where there are more values, points on the lines between them where fewer."""
    if len(values) >= n:
        bounds = [i * len(values) // n for i in range(n + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    return [_between(values, i * (len(values) - 1) / (n - 1)) for i in range(n)]


def _between(values: Sequence[float], position: float) -> float:
    left = int(position)
    right = min(left + 1, len(values) - 1)
    return values[left] + (values[right] - values[left]) * (position - left)


def _level(value: float, low: float, high: float, rows: int) -> int:
    """Row from the top; a flat curve lies in the middle."""
    if high == low:
        return rows // 2
    return round((high - value) / (high - low) * (rows - 1))


def _labelled(lines: list[str], low: float, high: float) -> list[str]:
    labels = [""] * len(lines)
    if low == high:
        labels[len(lines) // 2] = f"{low:.3f}"
    else:
        labels[0], labels[-1] = f"{high:.3f}", f"{low:.3f}"
    width = max(map(len, labels))
    return [f"{label:>{width}} ┤{line}" for label, line in zip(labels, lines, strict=True)]
