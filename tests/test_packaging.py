"""What a newcomer touches first: set-up, pins, make targets, recipes, units."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from jobs.quickstart.make_prompts import split
from jobs.quickstart.rewards import exact_number
from rlhfd.config import load_job

ROOT = Path(__file__).resolve().parents[1]
JOBS = sorted((ROOT / "jobs").glob("*.toml"))
UNITS = sorted((ROOT / "systemd").glob("*.service"))


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def rows_of(name):
    return [json.loads(line) for line in (ROOT / "jobs/quickstart" / name).read_text().splitlines()]


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(text) for text in [*project["dependencies"], *(t for part in extras.values() for t in part)]]


# --- pins and set-up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_requirement_has_a_pin_that_meets_it(requirement):
    assert requirement.specifier.contains(pins()[normal(requirement.name)])


def test_what_is_installed_is_what_is_pinned():
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/pins.py", "--check"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_a_pin_has_no_local_label_so_that_both_builds_of_torch_meet_it():
    assert not [version for version in pins().values() if "+" in version]


def set_up(cwd, *arguments, **environ):
    environ = {"PATH": os.environ["PATH"], "EXTRA": "cpu", **environ}
    command = ["bash", cwd / ".ci/setup", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up reads, in a folder of their own."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_set_up_names_the_python_that_it_needs(checkout):
    done = set_up(checkout, PYTHON="/bin/false")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "needs Python 3.11, 3.12 or 3.13 with venv" in done.stderr
    assert "/bin/false" in done.stderr


def test_set_up_leaves_a_folder_alone_that_is_no_environment(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv/mine").touch()
    done = set_up(checkout)
    assert done.returncode == 1
    assert ".venv is in the way" in done.stderr
    assert (checkout / ".venv/mine").exists()


def test_set_up_refuses_a_build_that_it_does_not_know(checkout):
    done = set_up(checkout, EXTRA="tpu")
    assert done.returncode == 1
    assert "EXTRA is 'tpu': it must be gpu or cpu" in done.stderr


@pytest.fixture
def quick_checkout(checkout):
    """A checkout whose set-up makes an environment of one script, named as pip would name it."""
    shutil.copytree(ROOT / "systemd", checkout / "systemd")
    (checkout / ".ci/setup").write_text(
        'set -eu\nmkdir -p "$2/bin"\n'
        'printf "#!%s/bin/python\\n" "$2" >"$2/bin/rlhfd"\nprintf "command = %s\\n" "$2" >"$2/pyvenv.cfg"\n'
    )
    return checkout


def install(checkout, *arguments, **environ):
    command = ["bash", checkout / ".ci/install", *arguments]
    environ = {"PATH": os.environ["PATH"], "HOME": str(checkout), **environ}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)


def test_install_leaves_no_trace_of_destdir_in_what_is_packaged(quick_checkout, tmp_path):
    root = tmp_path / "package"
    install(quick_checkout, DESTDIR=str(root), PREFIX="/opt/it")
    assert (root / "opt/it/bin/rlhfd").readlink() == Path("/opt/it/lib/rlhfd/bin/rlhfd")
    assert (root / "opt/it/lib/rlhfd/bin/rlhfd").read_text() == "#!/opt/it/lib/rlhfd/bin/python\n"
    unit = (root / "etc/systemd/system/rlhfd.service").read_text()
    assert "\nExecStart=/opt/it/bin/rlhfd serve\n" in unit
    assert "u rlhfd " in (root / "etc/sysusers.d/rlhfd.conf").read_text()
    written = [path.read_text() for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [text for text in written if str(root) in text]


def test_uninstall_takes_away_what_install_put_there(quick_checkout, tmp_path):
    root = tmp_path / "package"
    install(quick_checkout, DESTDIR=str(root))
    install(quick_checkout, "--remove", DESTDIR=str(root))
    assert not [path for path in root.rglob("*") if not path.is_dir()]


MAKE_TARGETS = ("setup", "quickstart", "test", "lint", "check", "install", "bench", "gpu-check", "clean")


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_has_the_target_and_lists_it(target):
    listed = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search(rf"^ *make {target} +\S", listed, re.MULTILINE)


def test_gpu_check_says_that_there_is_no_gpu(tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "-C", ROOT, "gpu-check"], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2  # make's own, for the 69 of its recipe
    assert "no GPU here" in done.stderr
    assert "69" in done.stderr


@pytest.mark.parametrize("script", ["setup", "run", "install"])
def test_scripts_stop_at_the_first_failure(script):
    text = (ROOT / ".ci" / script).read_text()
    assert "\nset -euo pipefail\n" in text
    subprocess.run(["bash", "-n", ROOT / ".ci" / script], check=True, timeout=60)
    assert os.access(ROOT / ".ci" / script, os.X_OK)


SKIPPING = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    pytest.skip("no GPU")

def test_something_else():
    pytest.skip("no wish")
"""


@pytest.mark.parametrize(("ci", "closing"), [("true", "1 failed, 1 skipped"), ("", "2 skipped")])
def test_under_ci_only_gpu_tests_may_skip(ci, closing, tmp_path):
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", tmp_path / "pytest.ini", tmp_path]
    environ = {**os.environ, "CI": ci}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert closing in done.stdout.splitlines()[-1], done.stdout


# --- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_a_recipe_is_a_valid_job_named_like_its_file(path):
    job, files = load_job(path)
    assert job.job.name == path.stem
    assert all(file.is_file() for file in files.values())


def test_the_quickstart_learns_for_at_least_twenty_steps_without_repeating_a_prompt():
    job, _ = load_job(ROOT / "jobs/quickstart.toml")
    assert job.job.max_steps >= 20
    ahead = job.rollout.overcommit
    assert (job.job.max_steps + job.rollout.max_staleness) * job.rollout.groups_per_step + ahead <= len(
        rows_of("prompts.jsonl")
    )


def test_no_held_out_sum_is_trained_on_in_either_order():
    def pair(row):
        return frozenset(re.findall(r"\d+", row["prompt"]))

    held_out = rows_of("holdout.jsonl")
    assert len(held_out) == len({row["prompt"] for row in held_out}) == 100
    assert not {pair(row) for row in held_out} & {pair(row) for row in rows_of("prompts.jsonl")}


def test_the_prompt_files_are_what_their_script_makes_and_their_answers_are_right():
    training, held_out = split()
    assert rows_of("prompts.jsonl") == training
    assert rows_of("holdout.jsonl") == held_out
    for row in training + held_out:
        a, b = map(int, re.findall(r"\d+", row["prompt"]))
        assert row == {"prompt": f"{a} + {b} = ? Reply with the number only.", "answer": str(a + b)}
        assert {a, b} <= set(range(2, 31))


@pytest.mark.parametrize(
    ("completion", "value"),
    [("22", 1.0), (" 22\n", 1.0), ("17 + 5 = 22.", 1.0), ("23", 0.0), ("22 or 23", 0.0), ("222", 0.0), ("two", 0.0)],
)
def test_exact_number_counts_the_last_number_of_a_completion(completion, value):
    assert exact_number(completion, "22") == value


# --- systemd -------------------------------------------------------------------------------------------------------

SERVICE = {
    "Type": "notify",
    "WatchdogSec": "60",
    "Restart": "on-failure",
    "RestartPreventExitStatus": "65 78",
    "KillMode": "mixed",
    "OOMPolicy": "continue",
    "TimeoutStopSec": "180",
    "RuntimeDirectory": "rlhfd",
    "CacheDirectory": "rlhfd",
}


def directives(unit):
    lines = [line for line in unit.read_text().splitlines() if line and not line.startswith(("#", "["))]
    return [tuple(line.split("=", 1)) for line in lines]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_says_how_the_daemon_starts_ends_and_comes_back(unit):
    found = dict(directives(unit))
    assert {key: found.get(key) for key in SERVICE} == SERVICE
    assert re.fullmatch(r"\S+/bin/rlhfd serve", found["ExecStart"])


def test_the_system_service_keeps_all_that_it_writes_in_its_own_directories():
    values = directives(ROOT / "systemd/rlhfd.service")
    assert ("StateDirectory", "rlhfd") in values
    environ = dict(value.split("=", 1) for key, value in values if key == "Environment")
    wanted = {"HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"}
    assert wanted == set(environ)
    assert all(re.match(r"%[SC]/rlhfd", path) for path in environ.values())


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_has_nothing_to_say_about_a_unit(unit, tmp_path):
    """It returns 0 on unknown keys, so silence is the measure. Where there is no systemd the tests above must do."""
    if shutil.which("systemd-analyze") is None:
        assert "CI" not in os.environ
        return
    installed = tmp_path / "rlhfd.service"
    installed.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
    scope = ["--user"] if "user" in unit.name else ["--system"]
    done = subprocess.run(
        ["systemd-analyze", *scope, "verify", installed],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
