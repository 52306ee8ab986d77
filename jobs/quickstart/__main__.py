"""What `make quickstart` runs: train, export, compare; build/quickstart/result.json; status 0 only if all holds.

    rlhfd serve ──► rlhfd run jobs/quickstart.toml ──► rlhfd export (start model, newest) ──► evaluate (held-out sums)

Interrupted, the next call goes on where the job was; after a whole one, the next starts afresh.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jobs.quickstart.serving import Daemon, Usage, serving

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs" / "quickstart.toml"
BUILD = ROOT / "build" / "quickstart"
RESULT = BUILD / "result.json"
STATE = BUILD / "state"
CALL_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number and the bound that it must keep."""

    what: str
    value: float
    bound: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What the run left: one metrics object a step, and the daemon's use at its start and end."""

    steps: Sequence[Mapping[str, Any]]
    seconds: float
    started: Usage
    ended: Usage


def rlhfd(daemon: Daemon, *arguments: str) -> str:
    """The standard output of a command. Raises CalledProcessError; its own sentence is on stderr."""
    command = [sys.executable, "-m", "rlhfd", *arguments]
    done = subprocess.run(
        command, env=daemon.environ, stdout=subprocess.PIPE, text=True, check=True, timeout=CALL_SECONDS
    )
    return done.stdout


def train(daemon: Daemon) -> Trained:
    """Follow the job to its end on this terminal, then export the start model and the trained one."""
    began, started = time.monotonic(), daemon.usage()
    subprocess.run([sys.executable, "-m", "rlhfd", "run", str(JOB)], env=daemon.environ, check=True)
    ended = daemon.usage()
    seconds = time.monotonic() - began
    job_id = str(max(job["id"] for job in json.loads(rlhfd(daemon, "ls", "--json"))))
    steps = json.loads(rlhfd(daemon, "metrics", job_id, "--json"))
    for name, version in (("before", ["--version", "0"]), ("after", [])):
        shutil.rmtree(BUILD / name, ignore_errors=True)  # of a run that was interrupted here
        rlhfd(daemon, "export", job_id, *version, str(BUILD / name))
    return Trained(steps=steps, seconds=seconds, started=started, ended=ended)


def evaluate() -> dict[str, Mapping[str, Any]]:
    """What evaluate.py says of the start model ("before") and the trained one ("after")."""
    before, after = str(BUILD / "before"), str(BUILD / "after")
    command = [sys.executable, "-m", "jobs.quickstart.evaluate", before, after]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=CALL_SECONDS
    )
    found = json.loads(done.stdout)
    return {"before": found[before], "after": found[after]}


def checks(trained: Trained, before: float, after: float) -> list[Check]:
    """What must hold for the quickstart to have worked."""
    rewards = [step["reward_mean"] for step in trained.steps]
    first, last = fmean(rewards[:3]), fmean(rewards[-5:])
    share, rss = trained.ended.cpu_share_since(trained.started), trained.ended.rss / 2**20
    return [
        Check(what="steps", value=len(rewards), bound="at least 20", ok=len(rewards) >= 20),
        Check(what="mean reward, first 3 steps", value=first, bound="under 0.25", ok=first < 0.25),
        Check(what="mean reward, last 5 steps", value=last, bound="over 0.45", ok=last > 0.45),
        Check(what="held-out sums right, before", value=before, bound="", ok=True),
        Check(
            what="held-out sums right, after", value=after, bound="at least 0.2 more", ok=after >= before + 0.2 - 1e-9
        ),
        Check(what="daemon's memory, MiB", value=rss, bound="under 150", ok=rss < 150),
        Check(what="daemon's share of one core", value=share, bound="under 0.05", ok=share < 0.05),
    ]


def report(trained: Trained, found: Sequence[Check], seconds: float) -> dict[str, Any]:
    """The content of result.json."""
    return {
        "passed": all(check.ok for check in found),
        "checks": [asdict(check) for check in found],
        "rewards": [step["reward_mean"] for step in trained.steps],
        "seconds": {"total": seconds, "run": trained.seconds},
        "daemon": {
            "rss_bytes": trained.ended.rss,
            "rss_peak_bytes": trained.ended.rss_peak,
            "cpu_seconds": trained.ended.cpu,
            "cpu_share": trained.ended.cpu_share_since(trained.started),
        },
        "cores": len(os.sched_getaffinity(0)),
        "metrics": list(trained.steps),
    }


def show(found: Sequence[Check]) -> None:
    """The checks, one a line."""
    print("\nquickstart")
    for check in found:
        verdict = ("ok" if check.ok else "NOT MET") if check.bound else ""
        print(f"  {check.what:<30}{check.value:>9.3f}  {check.bound:<18}{verdict}")


def main() -> int:
    """0 if every check holds, 1 if not, else the status of what failed."""
    began = time.monotonic()
    if RESULT.exists():
        shutil.rmtree(BUILD)
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        with serving(STATE, BUILD / "serve.log") as daemon:
            trained = train(daemon)
        held_out = evaluate()
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError as error:
        return error.returncode  # the command has said why
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    found = checks(trained, held_out["before"]["correct"], held_out["after"]["correct"])
    result = {**report(trained, found, time.monotonic() - began), "held_out": held_out}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(found)
    print(f"  details in {RESULT.relative_to(ROOT)}; the models are beside it: before, after")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
