"""How commands end: one sentence, the right status, no trace without --debug, and little CPU."""

import os
import resource
import subprocess
import sys

import pytest

from rlhfd.__main__ import main
from rlhfd.cli import status as status_module
from rlhfd.cli.app import COMMANDS

CPU_SECONDS = 0.25
RUNS = 5


def alone(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, without any daemon to find."""
    return subprocess.run(
        [sys.executable, "-m", "rlhfd", *argv],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_daemon_the_places_looked_at_are_named(tmp_path):
    ended = alone("status", "3", XDG_RUNTIME_DIR=str(tmp_path))
    assert (ended.returncode, ended.stdout) == (69, "")
    assert f"{tmp_path}/rlhfd/rlhfd.sock, /run/rlhfd/rlhfd.sock" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_named_socket_is_the_only_place(tmp_path):
    ended = alone("ls", "--socket", str(tmp_path / "none"), XDG_RUNTIME_DIR="/x")
    assert ended.returncode == 69
    assert f"answers on {tmp_path}/none;" in ended.stderr


def test_a_stale_socket_is_no_daemon(tmp_path):
    from rlhfd.api.server import bind

    bind(tmp_path / "s")[0].close()
    assert alone("ls", "--socket", str(tmp_path / "s")).returncode == 69


@pytest.mark.parametrize(
    "line",
    ["frobnicate", "status", "status 1 2", "ls --jsn", "samples 1 -n 0", "submit", "--socket", "export 1"],
)
def test_wrong_usage_is_one_sentence_and_64(line, capsys):
    assert main(line.split()) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rlhfd: ")
    assert said.err.count("\n") == 1
    assert "--help` shows how" in said.err


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert "Usage: rlhfd" in capsys.readouterr().out


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rlhfd ")


@pytest.mark.parametrize("command", [name for name, _, _ in COMMANDS])
def test_every_command_has_help_with_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"Example: rlhfd {command}" in capsys.readouterr().out


def test_help_names_every_command_whole(capsys):
    main(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name, _, _ in COMMANDS)
    assert "..." not in out.partition("Commands:")[2]


def test_an_error_is_a_trace_too_under_debug(tmp_path, capsys):
    assert main(["--debug", "--socket", str(tmp_path / "none"), "ls"]) == 69
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.splitlines()[-1].startswith("rlhfd: no daemon answers")


def test_a_bug_is_a_sentence_without_debug():
    bug = "from rlhfd.cli import status; status.answer = lambda *a: 1 / 0; from rlhfd.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", bug, "status", "3"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == "rlhfd: this is a bug in rlhfd: ZeroDivisionError: division by zero; --debug shows where\n"


def test_ctrl_c_is_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(status_module, "answer", interrupted)
    assert main(["status", "3"]) == 130


async def test_status_and_help_cost_little(service, socket_path):
    import asyncio

    job = service.add("adder", "running")
    assert await asyncio.to_thread(cheapest, "--socket", str(socket_path), "status", str(job)) < CPU_SECONDS
    assert await asyncio.to_thread(cheapest, "--help") < CPU_SECONDS


def cheapest(*argv: str) -> float:
    """User and system CPU seconds of a command, the best of RUNS."""
    return min(cost(*argv) for _ in range(RUNS))


def cost(*argv: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "rlhfd", *argv], stdout=subprocess.DEVNULL, check=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_status_imports_nothing_heavy():
    listed = "import sys; import rlhfd.__main__, rlhfd.cli.status; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, timeout=60, check=True)
    assert not {"typer", "pydantic", "rich", "httpx", "fastapi", "torch", "msgspec"} & set(ended.stdout.split())
