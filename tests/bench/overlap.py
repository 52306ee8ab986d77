"""What overlap is worth on this machine: the quickstart's job with and without, `python -m tests.bench.overlap`.

Arms, taken in turns so that a machine that slows down slows all of them:

    overlap   the job as it stands: generation goes on while the learner works, 2 groups beyond the batch
    off       synchronous: nothing stale, nothing ahead; the same cores for each role, one of them idle at a time
    shared    synchronous, but each role has all cores while it works: the best that can be done without overlap

The figure of an arm is its mean time per step, its first steps left out; the ratios come from one call's runs and
show with their spread. `results/overlap.json` keeps every finished run, so an interrupted bench goes on where it was;
remove it to start afresh. On a machine with GPUs `shared` means one GPU instead of two.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import rlhfd
from jobs.quickstart.serving import serving

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "jobs" / "quickstart.toml"
RESULTS = Path(__file__).resolve().parent / "results" / "overlap.json"
WARM_UP = 2  # steps: caches are cold, and the pipeline is still filling
SYNCHRONOUS = ("rollout.max_staleness=0", "rollout.overcommit=0", "rollout.overlap_learning=false")
ARMS: dict[str, tuple[str, ...]] = {
    "overlap": (),
    "off": SYNCHRONOUS,
    "shared": (*SYNCHRONOUS, 'resources.learner="share:generator"'),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One arm, once. Seconds per step and the mean of its parts, after the warm-up; tokens per second over the same."""

    arm: str
    turn: int
    seconds: float
    parts: dict[str, float]
    tokens_per_second: float
    staleness_mean: float


def run_arm(arm: str, turn: int, steps: int) -> Run:
    """Train `steps` steps with a daemon of its own and read its metrics."""
    with tempfile.TemporaryDirectory(prefix="rlhfd-bench-") as folder:
        state, config = Path(folder) / "state", Path(folder) / "config.toml"
        config.write_text(settings(arm))
        with serving(state, Path(folder) / "serve.log", config=config) as daemon:
            command = [sys.executable, "-m", "rlhfd", "run", str(JOB), "--set", f"job.max_steps={steps}"]
            for assignment in ARMS[arm]:
                command += ["--set", assignment]
            subprocess.run(command, env=daemon.environ, check=True)
            asked = [sys.executable, "-m", "rlhfd", "metrics", "1", "--json"]
            found = subprocess.run(asked, env=daemon.environ, check=True, stdout=subprocess.PIPE, text=True)
    return measured(arm, turn, json.loads(found.stdout)[WARM_UP:])


def settings(arm: str) -> str:
    """The daemon's settings: with one core set of all cores for the arm that shares, without GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    return f"cpu_devices = [{cores}]\n" if arm == "shared" else ""


def measured(arm: str, turn: int, steps: Sequence[dict[str, Any]]) -> Run:
    """The figures of one run from its metrics."""
    times = [step["time"] for step in steps]
    total = [time["total"] for time in times]
    return Run(
        arm=arm,
        turn=turn,
        seconds=fmean(total),
        parts={part: fmean(time[part] for time in times) for part in times[0]},
        tokens_per_second=sum(step["tokens_generated"] for step in steps) / sum(total),
        staleness_mean=fmean(step["staleness_mean"] for step in steps),
    )


def ratios(runs: Sequence[Run], baseline: str) -> list[float]:
    """How many times as fast as the baseline overlap was, turn by turn."""
    of = {(run.arm, run.turn): run.seconds for run in runs}
    turns = sorted(turn for arm, turn in of if arm == "overlap" and (baseline, turn) in of)
    return [of[baseline, turn] / of["overlap", turn] for turn in turns]


def report(runs: Sequence[Run], steps: int) -> dict[str, Any]:
    """The content of the results file."""
    return {
        "rlhfd": rlhfd.__version__,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "steps": steps,
        "ratio_to_off": ratios(runs, "off"),
        "ratio_to_shared": ratios(runs, "shared"),
        "runs": [asdict(run) for run in runs],
    }


def earlier(steps: int) -> list[Run]:
    """The finished runs of the same length that the results file has."""
    if not RESULTS.exists():
        return []
    found = json.loads(RESULTS.read_text())
    return [Run(**run) for run in found["runs"]] if found["steps"] == steps else []


def main() -> int:
    """0 when every arm has run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help=f"per run, the first {WARM_UP} uncounted")
    parser.add_argument("--turns", type=int, default=2, help="runs per arm")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP or arguments.turns < 1:
        parser.error(f"--steps must be more than {WARM_UP}, --turns at least 1")
    RESULTS.parent.mkdir(exist_ok=True)
    runs = earlier(arguments.steps)
    done = {(run.arm, run.turn) for run in runs}
    for turn in range(arguments.turns):
        for arm in ARMS:
            if (arm, turn) not in done:
                runs.append(run_arm(arm, turn, arguments.steps))
                RESULTS.write_text(json.dumps(report(runs, arguments.steps), indent=1) + "\n")
    for run in runs:
        print(f"{run.arm:<8} turn {run.turn}: {run.seconds:6.2f} s a step, {run.tokens_per_second:6.1f} tokens/s")
    for baseline in ("off", "shared"):
        print(f"overlap is {', '.join(f'{ratio:.2f}' for ratio in ratios(runs, baseline))} times as fast as {baseline}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
