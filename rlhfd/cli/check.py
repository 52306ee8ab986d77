"""`rlhfd check`: a job file and all it names, without a daemon, a device or the network.

What would come from the hub and is not in its cache can't be looked at here; it is named, and inspected at submit.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlhfd.cli import submission
from rlhfd.cli.client import Object, refusal
from rlhfd.cli.machine import refuse_platform
from rlhfd.cli.options import AsJson, JobFile, Sets
from rlhfd.cli.printing import harmless, number, print_json, size
from rlhfd.cli.submission import Submission
from rlhfd.core.places import cache_dir
from rlhfd.errors import DeadlineError, JobFileError

if TYPE_CHECKING:
    from rlhfd.config import JobConfig

INSPECT_SECONDS = 1800.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TAIL_LINES = 5


def check(context: typer.Context, job_file: JobFile, *, sets: Sets = None, as_json: AsJson = False) -> None:
    """Check a job file and everything that it names.

    Prints what follows from it: steps, tokens, memory. Changes nothing; needs no daemon, device or network.
    """
    del context
    refuse_platform()
    job = submission.read(job_file, sets or [])
    left = list(_left_to_submit(job.config))
    found = _described(job, None if left else inspect(job), left)
    if as_json:
        print_json(found)
    else:
        print(f"{job_file} is good")
        print("\n".join(f"  {name:<9} {text}" for name, text in _for_people(job.config, found)))


def inspect(job: Submission) -> Object:
    """What the inspection finds, offline, in a directory that is removed. Raises JobFileError, DeadlineError."""
    from rlhfd.config import load_settings

    with tempfile.TemporaryDirectory(prefix="rlhfd-check-") as name:
        out = Path(name)
        request = out / "request.json"
        asked = {
            "job": _offline(job.spec),
            "files": {name: str(path) for name, path in job.files.items()},
            "out_dir": str(out),
            "cache_dir": str(cache_dir(os.environ)),
            "allow_download": False,
            "allow_remote_code": load_settings(os.environ).allow_remote_code,
        }
        request.write_text(json.dumps(asked))
        _run_inspection(request)
        return json.loads((out / "facts.json").read_text())


def _offline(spec: Object) -> Object:
    """The job as it is when all that it fetches is in the cache."""
    return spec | {section: spec[section] | {"allow_download": False} for section in ("model", "data")}


def _run_inspection(request: Path) -> None:
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
    refused = request.parent / "error.json"
    if ended.returncode and refused.exists():
        raise refusal(json.loads(refused.read_text())["error"], ended.returncode)
    if ended.returncode:
        tail = "\n".join(harmless(line) for line in ended.stderr.splitlines()[-TAIL_LINES:])
        raise JobFileError(f"the inspection of model and data ended with status {ended.returncode}: it said\n{tail}")


def _left_to_submit(job: "JobConfig") -> Iterator[str]:
    """What would be fetched and is not in the hub's cache."""
    wanted = [("models", job.model.model_name_or_path)] if job.model.allow_download else []
    wanted += [("datasets", job.data.target)] if job.data.allow_download else []
    for kind, name in wanted:
        if not Path(name).is_absolute() and not _in_hub_cache(kind, name):
            yield name


def _in_hub_cache(kind: str, name: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}" / "snapshots").is_dir()


def _described(job: Submission, facts: Object | None, left: list[str]) -> Object:
    from rlhfd.core.estimate import estimate

    return {
        "name": job.config.job.name,
        "files": {name: str(path) for name, path in job.files.items()},
        "model": facts and facts["model"],
        "prompts": facts and facts["prompts"],
        "estimate": facts and asdict(estimate(job.config, facts)),
        "left_to_submit": left,
    }


def _for_people(job: "JobConfig", found: Object) -> Iterator[tuple[str, str]]:
    yield "job", found["name"]
    if found["left_to_submit"]:
        names = " and ".join(found["left_to_submit"])
        yield "later", f"{names} will be fetched and inspected at submit; nothing more follows from here"
        return
    yield "model", _model(found["model"])
    yield "prompts", _prompts(found["prompts"])
    yield from _follows(job, found["estimate"])


def _model(model: Object) -> str:
    return (
        f"{model['name']}: {model['parameters'] / 1e6:.1f} M parameters, {model['layers']} layers, "
        f"at most {model['max_model_len']} tokens"
    )


def _prompts(prompts: Object) -> str:
    skipped = f" ({prompts['skipped']} too long and skipped)" if prompts["skipped"] else ""
    return (
        f"{prompts['rows']}{skipped}, {number(prompts['tokens_mean'], 1)} tokens on average, "
        f"{prompts['tokens_max']} at most"
    )


def _follows(job: "JobConfig", derived: Object) -> Iterator[tuple[str, str]]:
    yield "steps", f"{derived['steps']}, {number(derived['epochs'], 2)} passes over the prompts"
    yield "tokens", f"at most {derived['tokens']:,} in {derived['completions']:,} completions"
    yield "in flight", f"{job.rollout.groups_per_step} + {derived['overcommit']} groups; {derived['staleness']}"
    yield "learns", f"{derived['trained_parameters'] / 1e6:.1f} M parameters"
    yield "memory", ", ".join(f"{role} {size(n)}{_devices(job, role)}" for role, n in derived["memory"].items())
    yield "disk", f"{size(derived['disk'])} of checkpoints; {size(derived['publication'])} in memory a publication"


def _devices(job: "JobConfig", role: str) -> str:
    """How the role's memory lies on its devices."""
    wanted: int | str = getattr(job.resources, role)
    if isinstance(wanted, str):
        return f" on the devices of the {wanted.partition(':')[2]}"
    return f" on {wanted} devices" if wanted > 1 else ""
