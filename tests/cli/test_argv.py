"""rlhfd's own options may stand anywhere, and a plain status line is read without typer."""

from pathlib import Path

import pytest

from rlhfd.cli.argv import hoist
from rlhfd.cli.client import Where
from rlhfd.cli.status import plain_question


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("status 3", "status 3"),
        ("status 3 --socket /s", "--socket /s status 3"),
        ("serve --state-dir=/x --debug", "--state-dir=/x --debug serve"),
        ("--debug submit job.toml --set a.b=1", "--debug submit job.toml --set a.b=1"),
        ("submit -- --socket", "submit -- --socket"),
        ("status --socket", "--socket status"),
        ("", ""),
    ],
)
def test_own_options_move_to_the_front(line, expected):
    assert hoist(line.split()) == expected.split()


@pytest.mark.parametrize(
    ("line", "where", "job", "as_json"),
    [
        ("status 3", Where(), "3", False),
        ("status --json 3", Where(), "3", True),
        ("--debug --socket /s status 3", Where(socket=Path("/s")), "3", False),
        ("--state-dir /x status 3 --json", Where(state_dir=Path("/x")), "3", True),
    ],
)
def test_a_plain_status_line_is_recognised(line, where, job, as_json):
    assert plain_question(line.split()) == (where, job, as_json)


@pytest.mark.parametrize(
    "line", ["", "ls", "status", "status --help", "status 3 4", "status -- 3", "--socket status 3"]
)
def test_any_other_line_is_left_to_typer(line):
    assert plain_question(line.split()) is None
