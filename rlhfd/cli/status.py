"""`rlhfd status ID`: one job. Standard library only, under 100 ms of CPU."""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rlhfd.cli.client import Object, Where, find
from rlhfd.cli.ending import misused


def plain_question(arguments: Sequence[str]) -> tuple[Where, str, bool] | None:
    """(where, id, as JSON) of an ordinary `status` line; None for any other, which typer shall read."""
    where, words, left = Where(), list[str](), list(arguments)
    as_json = False
    while left:
        word = left.pop(0)
        if word in {"--socket", "--state-dir"} and left:
            where = replace(where, **{word[2:].replace("-", "_"): Path(left.pop(0))})
        elif word == "--json":
            as_json = True
        elif word != "--debug":
            words.append(word)
    if len(words) != 2 or words[0] != "status" or words[1].startswith("-"):
        return None
    return where, words[1], as_json


def answer(where: Where, job: str, as_json: bool) -> int:
    """Print the job's status."""
    if not job.isdecimal() or int(job) < 1:
        return misused(f"{job!r} is no job id; `rlhfd ls` lists them", "rlhfd status")
    found = find(where).get(f"/jobs/{int(job)}")
    print(json.dumps(found) if as_json else for_people(found))
    return 0


def for_people(job: Object) -> str:
    """A few lines; those without content are left out."""
    lines = {
        "step": f"{job['step']} of {job['max_steps']}",
        "now": job.get("phase"),
        "reason": job["reason"],
        "attempt": job["attempt"],
        "devices": ", ".join(map(str, job.get("devices") or ())),
        "created": local_time(job.get("created")),
        "updated": local_time(job.get("updated")),
    }
    shown = (f"  {name:<8} {value}" for name, value in lines.items() if value not in {None, ""})
    return "\n".join([f"job {job['id']}  {job['name']}  {job['state']}", *shown])


def local_time(moment: str | None) -> str:
    """ISO-8601 to the reader's own clock."""
    if not moment:
        return ""
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")
