"""`rlhfd` and `python -m rlhfd`.

`status` is answered without typer, which brings pydantic: scripts ask it often, and it shall cost little.
"""

import sys
from collections.abc import Sequence

from rlhfd.cli.argv import hoist
from rlhfd.cli.ending import ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: its exit status."""
    arguments = hoist(sys.argv[1:] if argv is None else argv)
    return ended(lambda: _command(arguments), debug="--debug" in arguments)


def _command(arguments: list[str]) -> int:
    from rlhfd.cli import status

    if (asked := status.plain_question(arguments)) is not None:
        return status.answer(*asked)
    from rlhfd.cli.app import run_app

    return run_app(arguments)


if __name__ == "__main__":
    sys.exit(main())
