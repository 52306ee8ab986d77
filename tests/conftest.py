"""What tests share: a tiny real model, made once a run, and one real vLLM server that serves it.

And which tests may skip: those marked `gpu`, where there is no GPU. Under CI every other skip is a failure.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from rlhfd.core.types import Epoch, JobId
from rlhfd.engines.vllm import EngineDeadlines
from rlhfd.engines.vllm_server import ServerSpec, VllmServer

REPOSITORY = Path(__file__).parents[1]
START_DEADLINE = 300.0  # seconds; a start takes 25 on an idle machine and three times that on a busy one

MakeTinyModel = Callable[..., Path]
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def run_python(*argv: str | Path) -> str:
    """Run a script of this repository in a process of its own; its stdout."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, argv)], env=env, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeTinyModel:
    """`make_tiny_model("--seed", "3", "--eos")`: a directory as tests/tiny_model.py writes it, made once a run."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*options: str) -> Path:
        if options not in made:
            directory = tmp_path_factory.mktemp("tiny") / "model"
            run_python("tests/tiny_model.py", directory, *options)
            made[options] = directory
        return made[options]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model: MakeTinyModel) -> Path:
    """Tied, without an end token, seed 0."""
    return make_tiny_model()


def tiny_server_spec(directory: Path, model: Path, **more: object) -> ServerSpec:
    """A server of the tiny model in float32 on the first core."""
    fields: dict[str, object] = {
        "job_id": JobId(1),
        "attempt": 1,
        "epoch": Epoch(1),
        "model_dir": model,
        "socket": directory / "engine.sock",
        "log_path": directory / "engine.log",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 32,
        "kv_cache_bytes": 64 * 1024 * 1024,
        "cores": (min(os.sched_getaffinity(0)),),
    }
    return ServerSpec(**fields | more)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[VllmServer]:
    """The one real server of a run. Its loop is the session's: tests on another make a client of their own."""
    spec = tiny_server_spec(tmp_path_factory.mktemp("vllm"), tiny_model)
    server = await VllmServer.start(spec, EngineDeadlines(start=START_DEADLINE))
    yield server
    await server.stop()


def has_gpu() -> bool:
    """Whether nvidia-smi lists one."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    return "GPU" in listed.stdout


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not has_gpu():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and nvidia-smi lists none"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return report if item.get_closest_marker("gpu") else refuse_skip(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return refuse_skip((yield))


def refuse_skip(report: Report) -> Report:
    """Turn a skip into a failure where CI is set: what skipped has shown nothing."""
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI, where only tests marked gpu may: {report.longrepr}"
    return report
