"""Text on the terminal: tables, numbers, and other people's text without its control characters."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200  # columns where there is no terminal to ask
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def print_json(value: Any) -> None:
    """One JSON value on one line."""
    print(json.dumps(value))


def harmless(text: str) -> str:
    r"""What a model or a log wrote, unable to steer the terminal: control characters as \xNN."""
    return text.translate(CONTROL)


def number(value: Any, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{digits}g}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.{digits}f}"
    return str(value)


def seconds(value: float) -> str:
    """A span of time as h:mm:ss, or m:ss under an hour."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number over one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def console(*, stderr: bool = False) -> "Console":
    """A rich console; wide where the output is a file or a pipe."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = PIPE_WIDTH
    return made


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: frozenset[str] = frozenset()) -> None:
    """A table without lines; columns in `left` are text, the others numbers on the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    console().print(table)


def pairs(values: Mapping[str, Any]) -> str:
    """key=value, separated by blanks."""
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items() if value is not None)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value if value and not set(value) & set(' ="\n') else json.dumps(value, ensure_ascii=False)
    return number(value) if isinstance(value, int | float) else json.dumps(value)
