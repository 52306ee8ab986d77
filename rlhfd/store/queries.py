"""SQL by name: `queries.sql` holds every statement that is longer than a line, each under a `-- name:` heading."""

from functools import cache
from importlib.resources import files


def query(name: str) -> str:
    """The statement called `name`. Raises KeyError, at import of the module that asks, for a name that is not there."""
    return _statements()[name]


@cache
def _statements() -> dict[str, str]:
    sections = files("rlhfd.store").joinpath("queries.sql").read_text(encoding="utf-8").split("-- name: ")[1:]
    named = (section.split("\n", 1) for section in sections)
    return {name.strip(): body.strip() for name, body in named}
