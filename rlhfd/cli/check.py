"""`rlhfd check`: a job file and all it names, without a daemon, a device or the network."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer

from rlhfd.cli import submission
from rlhfd.cli.client import Object
from rlhfd.cli.machine import refuse_platform
from rlhfd.cli.options import AsJson, JobFile, Sets
from rlhfd.cli.printing import harmless, print_json
from rlhfd.cli.submission import Submission
from rlhfd.core.places import cache_dir
from rlhfd.errors import DeadlineError, JobFileError

INSPECT_SECONDS = 1800.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TAIL_LINES = 5


def inspect(job: Submission, *, allow_remote_code: bool) -> Object:
    """What the inspection finds, offline, in a directory that is removed. Raises JobFileError, DeadlineError."""
    with tempfile.TemporaryDirectory(prefix="rlhfd-check-") as name:
        out = Path(name)
        request = out / "request.json"
        request.write_text(
            json.dumps(
                {
                    "job": job.spec,
                    "files": {name: str(path) for name, path in job.files.items()},
                    "out_dir": str(out),
                    "cache_dir": str(cache_dir(os.environ)),
                    "allow_download": False,
                    "allow_remote_code": allow_remote_code,
                }
            )
        )
        _inspection(request)
        return json.loads((out / "facts.json").read_text())


def _inspection(request: Path) -> None:
    command = [sys.executable, "-m", "rlhfd.workers.inspect", str(request)]
    try:
        ended = subprocess.run(
            command,
            env=os.environ | OFFLINE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSPECT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"the inspection of model and data did not end within {INSPECT_SECONDS:g} s") from error
    if ended.returncode == JobFileError.exit_status:
        raise JobFileError(json.loads((request.parent / "error.json").read_text())["error"])
    if ended.returncode:
        tail = "\n".join(harmless(line) for line in ended.stderr.splitlines()[-TAIL_LINES:])
        raise JobFileError(f"the inspection of model and data ended with status {ended.returncode}: it said\n{tail}")


def check(context: typer.Context, job_file: JobFile, *, sets: Sets = None, as_json: AsJson = False) -> None:
    """Check a job file and everything that it names.

    Prints what follows from it: steps, tokens, memory. Changes nothing; needs no daemon, device or network.
    """
    del context
    refuse_platform()
    facts = inspect(submission.read(job_file, sets or []), allow_remote_code=False)
    print_json(facts) if as_json else print(facts)
