"""A curve in the terminal, in braille dots. Not plotext: it colours, clears and sizes the screen by itself."""

from collections.abc import Sequence
from itertools import pairwise

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # rows x columns of one braille cell
BLANK = 0x2800


def curve(values: Sequence[float], *, width: int = 60, height: int = 8) -> list[str]:
    """`height` lines of text with the range on the left; more values than 2 x width are averaged. [] for no values."""
    if not values:
        return []
    points = _thinned(values, 2 * width)
    low, high = min(points), max(points)
    rows = [_level(value, low, high, 4 * height) for value in points]
    cells = [[BLANK] * ((len(points) + 1) // 2) for _ in range(height)]
    for column, (before, row) in enumerate(zip([rows[0], *rows], rows, strict=False)):
        for filled in range(min(before, row), max(before, row) + 1):
            cells[filled // 4][column // 2] |= DOTS[filled % 4][column % 2]
    return _labelled(["".join(map(chr, line)) for line in cells], low, high)


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most `most` means of neighbours."""
    n = min(len(values), most)
    bounds = [i * len(values) // n for i in range(n + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]


def _level(value: float, low: float, high: float, rows: int) -> int:
    """Row from the top; a flat curve lies in the middle."""
    if high == low:
        return rows // 2
    return round((high - value) / (high - low) * (rows - 1))


def _labelled(lines: list[str], low: float, high: float) -> list[str]:
    labels = [""] * len(lines)
    labels[-1], labels[0] = f"{low:.3f}", f"{high:.3f}"
    if low == high:
        labels = [""] * len(lines)
        labels[len(lines) // 2] = f"{low:.3f}"
    width = max(map(len, labels))
    return [f"{label:>{width}} ┤{line}" for label, line in zip(labels, lines, strict=True)]
