"""A named point kills the process that passes it, and only there."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfd.core import crash

PACKAGE = Path(crash.__file__).parents[1]
POINT = min(crash.POINTS)


def run(passings: int, **env: str) -> subprocess.CompletedProcess[str]:
    code = f"from rlhfd.core import crash\nfor i in range({passings}):\n    crash.here({POINT!r})\n    print(i)"
    env = {"PYTHONPATH": str(PACKAGE.parent)} | env
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def test_a_point_that_nobody_named_is_passed():
    assert run(2).stdout.split() == ["0", "1"]


def test_a_named_point_kills_at_its_first_passing():
    done = run(2, RLHFD_CRASH_AT=POINT)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_number_names_the_passing():
    done = run(5, RLHFD_CRASH_AT=f"{POINT}:3", PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["0", "1"])


def test_another_point_is_passed():
    assert run(1, RLHFD_CRASH_AT="elsewhere").returncode == 0


def test_a_point_outside_the_table_is_a_mistake():
    with pytest.raises(ValueError, match=r"no\.such\.point is not a crash point"):
        crash.here("no.such.point")


def test_the_table_is_exactly_what_the_source_passes():
    passed = {
        name for path in PACKAGE.rglob("*.py") for name in re.findall(r'crash\.here\(\s*"([^"]+)"', path.read_text())
    }
    assert passed == crash.POINTS
