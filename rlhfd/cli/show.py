"""Commands that print what a job has written: logs, samples, metrics, events."""

import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import typer

from rlhfd.cli.client import Daemon, Object
from rlhfd.cli.follow import ENDED, POLL_SECONDS
from rlhfd.cli.options import AsJson, JobId, daemon
from rlhfd.cli.printing import harmless, number, pairs, print_json, print_table
from rlhfd.cli.status import local_time

TAIL_BYTES = 16 * 1024
LOG_SECONDS = 0.5
PROMPT_TAIL = 300  # characters

Worker = Annotated[
    str | None, typer.Option(metavar="NAME", help="generator, learner, rewards …; default: the job's own lines.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]
Many = Annotated[int, typer.Option("-n", metavar="N", min=1, max=1000, help="How many.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV; `time` becomes columns time.*.")]


def logs(context: typer.Context, job_id: JobId, *, worker: Worker = None, follow: Follow = False) -> None:
    """Print the end of a job's log."""
    asked = daemon(context)
    for text in _log_pieces(asked, job_id, worker, follow=follow):
        sys.stdout.write(harmless(text))
        sys.stdout.flush()


def samples(context: typer.Context, job_id: JobId, *, many: Many = 4, as_json: AsJson = False) -> None:
    """Show completions that were trained on, newest first.

    With --json each has its tokens, and for every token the version that sampled it and what the learner used.
    """
    found: list[Object] = daemon(context).get(f"/jobs/{job_id}/samples", n=many)
    if as_json:
        print_json(found)
    else:
        print("\n\n".join(map(_sample, found)) if found else "no step has been learned yet")


def metrics(context: typer.Context, job_id: JobId, *, as_csv: Csv = False, as_json: AsJson = False) -> None:
    """Print the metrics of every step."""
    steps: list[Object] = daemon(context).get(f"/jobs/{job_id}/metrics", after=0)
    if as_json:
        print_json(steps)
    elif as_csv:
        _print_csv([flat(step) for step in steps])
    else:
        print_steps(steps)


def events(context: typer.Context, job_id: JobId, *, follow: Follow = False, as_json: AsJson = False) -> None:
    """Print what happened to a job.

    Starts, engines lost and restarted, rewards that failed, replays. With --follow and --json, one object a line.
    """
    asked = daemon(context)
    if as_json and not follow:
        print_json(asked.get(f"/jobs/{job_id}/events", after=0))
        return
    for event in _event_stream(asked, job_id, follow=follow):
        print(json.dumps(event) if as_json else event_line(event), flush=True)


# --- forms ------------------------------------------------------------------------------------------------------------


def event_line(event: Object) -> str:
    """An event for people: when, what, and its details."""
    details = {key: value for key, value in event.items() if key not in {"id", "at", "kind"}}
    return harmless(f"{local_time(event['at'])}  {event['kind']}  {pairs(details)}".rstrip())


def flat(step: Object) -> dict[str, Any]:
    """A step's metrics with `time` as time.*."""
    return {key: value for key, value in step.items() if key != "time"} | {
        f"time.{name}": value for name, value in times(step).items()
    }


def times(step: Object) -> dict[str, float | None]:
    """A step's phases, seconds."""
    return step.get("time") or {}


def print_steps(steps: Sequence[Object]) -> None:
    """The metrics that say most, one line a step."""
    heads = ["STEP", "REWARD", "±", "LENGTH", "MAX", "STALE", "MAX", "LOSS", "GRAD", "CLIP", "LOGP DIFF", "TOK/S", "S"]
    print_table(heads, map(_step_row, steps))


def tokens_per_second(step: Object) -> float | None:
    """Committed completion tokens over the step's whole time; None where either is unknown."""
    total = times(step).get("total")
    tokens = step.get("tokens_generated")
    return tokens / total if total and tokens is not None else None


def _step_row(step: Object) -> list[str]:
    rate = tokens_per_second(step)
    keys = ("reward_mean", "reward_std", "completion_length_mean", "completion_length_max", "staleness_mean")
    more = ("staleness_max", "loss", "grad_norm", "clip_fraction", "logp_diff_mean")
    values = [number(step.get(key)) for key in (*keys, *more)]
    return [str(step["step"]), *values, number(rate, 0), number(times(step).get("total"), 1)]


def _print_csv(rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return
    out = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    out.writeheader()
    out.writerows(rows)


def _sample(sample: Object) -> str:
    named: dict[str, float] = sample.get("reward_parts") or {}
    parts = ", ".join(f"{name} {number(value)}" for name, value in named.items())
    facts = [
        f"step {sample['step']}",
        f"group {sample['ordinal']}.{sample['k']}",
        f"reward {number(sample['reward'])}" + (f" ({parts})" if parts else ""),
        f"advantage {sample['advantage']:+.3f}",
        f"versions {_span(sample['version_steps'])}",
        f"{len(sample['tokens'])} tokens, ended by {sample['finish']}",
    ]
    if sample.get("resumes"):
        facts.append(f"continued {sample['resumes']}x")
    tail = prompt_text(sample["prompt"])
    prompt = tail if len(tail) <= PROMPT_TAIL else "…" + tail[-PROMPT_TAIL:]
    return harmless(f"── {' · '.join(facts)}\n{prompt}\n── answer\n{sample['completion'] or ''}")


def prompt_text(stored: str) -> str:
    """The snapshot's JSON of a string or of chat messages, as text."""
    try:
        prompt = json.loads(stored)
    except ValueError:
        return stored
    if isinstance(prompt, list):
        messages = cast("list[dict[str, Any]]", prompt)
        return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)
    return str(prompt)


def _span(versions: Sequence[int]) -> str:
    if not versions:
        return "none"
    first, last = min(versions), max(versions)
    return str(first) if first == last else f"{first} to {last}"


# --- streams ----------------------------------------------------------------------------------------------------------


def _log_pieces(asked: Daemon, job_id: int, worker: str | None, *, follow: bool) -> Iterator[str]:
    """The tail, then what is added, until the job has ended. A new attempt's file is read from its start."""
    offset = -TAIL_BYTES
    while True:
        ended = asked.get(f"/jobs/{job_id}")["state"] in ENDED
        piece = asked.get(f"/jobs/{job_id}/logs", worker=worker, offset=offset)
        if piece["offset"] < offset:
            piece = asked.get(f"/jobs/{job_id}/logs", worker=worker, offset=0)
        yield piece["text"]
        offset = piece["offset"]
        if not follow or (ended and not piece["text"]):
            return
        if not piece["text"]:
            time.sleep(LOG_SECONDS)


def _event_stream(asked: Daemon, job_id: int, *, follow: bool) -> Iterator[Object]:
    after = 0
    while True:
        ended = asked.get(f"/jobs/{job_id}")["state"] in ENDED
        wait = POLL_SECONDS if follow and not ended else 0
        news: list[Object] = asked.get(f"/jobs/{job_id}/events", after=after, wait=wait)
        yield from news
        after = news[-1]["id"] if news else after
        if not follow or (ended and not news):
            return
