"""Commands that make jobs and change their state: submit, ls, status, pause, resume, cancel, retry."""

import sys
from typing import Annotated

import typer

from rlhfd.cli import follow, status, submission
from rlhfd.cli.client import Object
from rlhfd.cli.options import After, Again, AsJson, JobFile, JobId, Priority, Sets, daemon, where
from rlhfd.cli.printing import print_json, print_table

Watch = Annotated[bool, typer.Option("--watch", help="Follow the job to its end; its exit status is the job's.")]


def submit(
    context: typer.Context,
    job_file: JobFile,
    *,
    sets: Sets = None,
    after: After = None,
    priority: Priority = 0,
    again: Again = False,
    watch: Watch = False,
    as_json: AsJson = False,
) -> int:
    """Queue a job and print its id.

    The job file and every local file that it names are copied now; later edits don't change a queued job. The same
    content and name give the same id, whatever its state.
    """
    job = submission.read(job_file, sets or [])
    asked = daemon(context)
    made = submission.send(asked, job, after=after, priority=priority, again=again)
    if watch:
        return follow.to_the_end(asked, made, as_json=as_json)
    if as_json:
        print_json(made)
    else:
        print(made["id"])
        print(told(made), file=sys.stderr)
    return 0


def ls(context: typer.Context, *, as_json: AsJson = False) -> None:
    """List all jobs."""
    jobs: list[Object] = daemon(context).get("/jobs")
    if as_json:
        print_json(jobs)
        return
    heads = ["ID", "NAME", "STATE", "STEP", "UPDATED", "NOW"]
    print_table(heads, map(_row, jobs), left=frozenset(heads) - {"ID", "STEP"})


def status_command(context: typer.Context, job_id: JobId, *, as_json: AsJson = False) -> int:
    """Show where one job stands.

    State, step, what it does now, and why it waits or failed.
    """
    return status.answer(where(context), str(job_id), as_json)


def pause(context: typer.Context, job_id: JobId, *, as_json: AsJson = False) -> None:
    """Write a checkpoint, free the devices, and wait for `resume`."""
    _change(context, job_id, "pause", as_json)


def resume(context: typer.Context, job_id: JobId, *, as_json: AsJson = False) -> None:
    """Let a paused job go on where it was."""
    _change(context, job_id, "resume", as_json)


def cancel(context: typer.Context, job_id: JobId, *, as_json: AsJson = False) -> None:
    """End a job for good; its checkpoints stay."""
    _change(context, job_id, "cancel", as_json)


def retry(context: typer.Context, job_id: JobId, *, as_json: AsJson = False) -> None:
    """Queue a failed job again; it goes on from its last step."""
    _change(context, job_id, "retry", as_json)


def told(job: Object) -> str:
    """One sentence about a job that was just submitted."""
    name = f"job {job['id']} ({job['name']})"
    if job.get("created", True):
        return f"{name} is {job['state']}"
    sentence = f"{name} has the same content and is {job['state']}"
    if job["state"] == "failed":
        return f"{sentence}: {job['reason']}; `rlhfd retry {job['id']}` tries again"
    if job["state"] in {"done", "cancelled"}:
        return f"{sentence}; --again makes a new one"
    return sentence


def _row(job: Object) -> list[str]:
    now = job["reason"] or job.get("phase") or ""
    step = f"{job['step']}/{job['max_steps']}"
    return [str(job["id"]), job["name"], job["state"], step, status.local_time(job.get("updated")), now]


def _change(context: typer.Context, job_id: int, verb: str, as_json: bool) -> None:
    job = daemon(context).post(f"/jobs/{job_id}/{verb}")
    if as_json:
        print_json(job)
    else:
        print(f"job {job['id']} ({job['name']}) is {job['state']}" + (f": {job['phase']}" if job.get("phase") else ""))
