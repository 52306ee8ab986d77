"""A real daemon as a child process, driven as a user drives it: by the command line and the API."""

import http.client
import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlhfd.core import procfs
from rlhfd.devices import RECORDING

REPOSITORY = Path(__file__).parents[1]
FAKE_ENGINE = "rlhfd.testing.engine"
REAL_ENGINE = "vllm.entrypoints.openai.api_server"
DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # also when the tests themselves are killed
START_SECONDS = 60.0
STOP_SECONDS = 120.0
CLI_SECONDS = 180.0
GONE_SECONDS = 10.0

REWARDS = '''
def vowels(completion):
    """A number that differs from completion to completion."""
    return sum(letter in "aeiou" for letter in completion) / (1 + len(completion))


def length(completion, answer):
    return float(len(completion)) / 100
'''


def toml(table: Mapping[str, Any]) -> str:
    """Plain data as TOML: tables one or two deep, lists of tables under [[reward]]."""
    lines: list[str] = []
    for name, section in table.items():
        for head, body in (
            [(f"[[{name}]]", s) for s in section] if isinstance(section, list) else [(f"[{name}]", section)]
        ):
            lines.append(head)
            lines += [f"{key} = {_value(value)}" for key, value in body.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def write_job(directory: Path, model: Path | str, /, **changes: Any) -> Path:
    """job.toml, rewards.py and prompts.jsonl for a tiny model; each keyword overrides keys of its section.

    `reward`, a list, replaces all rewards; a value None removes the key.
    """
    job: dict[str, Any] = {
        "job": {"name": "tiny", "seed": 7, "max_steps": 2},
        "model": {"model_name_or_path": str(model), "dtype": "float32"},
        "data": {"source": "jsonl:prompts.jsonl"},
        "reward": [{"type": "function", "path": "rewards.py:vowels"}],
        "rollout": {"groups_per_step": 2, "num_generations": 4, "max_completion_length": 16},
        "learner": {"learning_rate": 1e-3},
        "checkpoint": {"save_steps": 2},
    }
    for section, keys in changes.items():
        if isinstance(keys, list):
            job[section] = keys
        else:
            merged = {**job.get(section, {}), **keys}
            job[section] = {key: value for key, value in merged.items() if value is not None}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"say {number}", "answer": str(number)} for number in range(8)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "job.toml"
    path.write_text(toml(job))
    return path


def still_there(processes: Iterable[procfs.Process], seconds: float) -> list[procfs.Process]:
    """Those that have not ended within so many seconds."""
    deadline, left = time.monotonic() + seconds, []
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([handle], [], [], max(deadline - time.monotonic(), 0.0))
        os.close(handle)
        if not ended and procfs.start_ticks(process.pid) == process.started:
            left.append(process)
    return left


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("daemon", timeout=timeout)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Daemon:
    """`with Daemon(state_dir) as daemon:` runs one and leaves no process behind."""

    def __init__(
        self,
        state_dir: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        socket: Path | None = None,
    ) -> None:
        self.state_dir = state_dir
        self.socket = socket or state_dir / "rlhfd.sock"
        self._settings = {"generator_module": FAKE_ENGINE, **(settings or {})}
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RLHFD_")}
        self._env = {**inherited, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", **(env or {})}
        self._prefix = prefix
        self._log = state_dir.with_name(state_dir.name + ".serve.log")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = self.children()
        if self.process.poll() is None:
            self.kill()
        left = still_there(children, GONE_SECONDS)
        for process in left:
            procfs.send(process, signal.SIGKILL)
        assert error is not None or not left, f"left behind: {left}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        config = self.state_dir.with_name(self.state_dir.name + ".config.toml")
        config.parent.mkdir(parents=True, exist_ok=True)
        top = {k: v for k, v in self._settings.items() if not isinstance(v, Mapping)}
        tables = {k: v for k, v in self._settings.items() if isinstance(v, Mapping)}
        config.write_text("".join(f"{k} = {_value(v)}\n" for k, v in top.items()) + toml(tables))
        config.with_suffix(".nvml.json").write_text("[]")  # these tests are the CPU's, also where there are GPUs
        self._env.setdefault(RECORDING, str(config.with_suffix(".nvml.json")))
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*DIE_WITH_US, *self._prefix, *self._command("serve", "--config", str(config))],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._until_it_answers()

    def _until_it_answers(self) -> None:
        ended = os.pidfd_open(self.process.pid)
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self._answers():
                gone, _, _ = select.select([ended], [], [], 0.05)
                assert not gone, f"the daemon ended with {self.process.wait()}:\n{self.log()}"
                assert time.monotonic() < deadline, f"the daemon did not answer:\n{self.log()}"
        finally:
            os.close(ended)

    def _answers(self) -> bool:
        try:
            return self.get("/v1/ping")["pid"] == self.process.pid
        except OSError:
            return False

    def log(self) -> str:
        """What it wrote to stdout and stderr, all its starts."""
        return self._log.read_text()

    def _command(self, *arguments: str) -> list[str]:
        where = ["--state-dir", str(self.state_dir), "--socket", str(self.socket)]
        return [sys.executable, "-m", "rlhfd", *where, *arguments]

    def cli(self, *arguments: str | int | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the command line against it."""
        return subprocess.run(
            self._command(*map(str, arguments)),
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CLI_SECONDS,
            check=False,
        )

    def get(self, path: str, seconds: float = 60.0) -> Any:
        """A GET of the API, decoded."""
        connection = _Connection(self.socket, seconds)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def submit(self, job: Path, *flags: str) -> int:
        """Submit by the command line; the id."""
        done = self.cli("submit", job, "--json", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["id"]

    def status(self, job_id: int) -> dict[str, Any]:
        """The status object."""
        return self.get(f"/v1/jobs/{job_id}")

    def events(self, job_id: int, after: int = 0, wait: float = 0.0) -> list[dict[str, Any]]:
        """The job's events past `after`; waits up to so many seconds for the next."""
        return self.get(f"/v1/jobs/{job_id}/events?after={after}&wait={wait}", wait + 60.0)

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """What its database holds, read beside it."""
        with closing(sqlite3.connect(f"file:{self.state_dir / 'rlhfd.db'}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return connection.execute(sql, values).fetchall()

    def wait_event(self, job_id: int, kind: str, seconds: float = 120.0, after: int = 0) -> dict[str, Any]:
        """The first event of a kind past `after`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for event in self.events(job_id, after, min(left, 10.0)):
                after = event["id"]
                if event["kind"] == kind:
                    return event
        raise AssertionError(f"no event {kind} within {seconds:g} s: {self.status(job_id)}\n{self.log()}")

    def wait(self, job_id: int, states: set[str], seconds: float = 120.0) -> dict[str, Any]:
        """The status once the job is in one of the states."""
        deadline, after = time.monotonic() + seconds, 0
        while True:
            status = self.status(job_id)
            if status["state"] in states:
                return status
            left = deadline - time.monotonic()
            assert left > 0, f"still {status}\n{self.log()}"
            for event in self.events(job_id, after, min(left, 10.0)):
                after = event["id"]

    def wait_dead(self, seconds: float) -> int:
        """The exit status of a daemon that ends by itself; negative: the signal that killed it."""
        return self.process.wait(seconds)

    def children(self) -> list[procfs.Process]:
        """Every process below it."""
        return procfs.tree(self.process.pid) if self.process.poll() is None else []

    def kill(self) -> int:
        """kill -9, the daemon alone."""
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM, as a service manager stops it; its exit status."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)
