"""A live API over the fake service, and the command line run against it in this process."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhfd.__main__ import main
from rlhfd.api import create_app, serve_api
from tests.fake_service import FakeService

JOB = """
[job]
name = "{name}"
max_steps = 3
[model]
model_name_or_path = "smollm2-135m-instruct"
[data]
source = "jsonl:prompts.jsonl"
[[reward]]
type = "function"
path = "rewards.py:right"
"""


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str


@pytest.fixture
def cli(socket_path, capsys, monkeypatch):
    """Run a command against the live fake daemon."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a command sets its own

    async def run(*argv: str) -> Outcome:
        capsys.readouterr()
        status = await asyncio.to_thread(main, ["--socket", str(socket_path), *argv])
        said = capsys.readouterr()
        return Outcome(status, said.out, said.err)

    return run


@pytest.fixture
def socket_path(tmp_path):
    return tmp_path / "s"


@pytest.fixture
async def service(tmp_path, socket_path):
    files = tmp_path / "files"
    files.mkdir()
    fake = FakeService(files)
    async with serve_api(create_app(fake), socket_path):
        yield fake


@pytest.fixture
def job_file(tmp_path) -> Path:
    return write_job(tmp_path / "work")


def write_job(directory: Path, name: str = "adder") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "prompts.jsonl").write_text('{"prompt": "1 + 1?", "answer": 2}\n')
    (directory / "rewards.py").write_text(
        "def right(completion, answer):\n    return float(str(answer) in completion)\n"
    )
    path = directory / "job.toml"
    path.write_text(JOB.format(name=name))
    return path
