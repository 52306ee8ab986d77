"""`rlhfd audit`: the stored log-probs against weights that are derived again."""

import json
import sys
from collections.abc import Iterator

import typer

from rlhfd.cli.client import Daemon, Object, refusal
from rlhfd.cli.options import AsJson, JobId, daemon
from rlhfd.cli.printing import number, print_json, print_table
from rlhfd.errors import RlhfdError

SILENCE_SECONDS = 1800.0  # loading a model and replaying a step come without a word in between


def audit(context: typer.Context, job_id: JobId, *, as_json: AsJson = False) -> None:
    """Check the stored tokens against the weights they name.

    Derives the weights again (checkpoint and replay) and with them the log-probs of the stored tokens. Reports the
    error under the version named and, for comparison, under its neighbour. It leases the learner's devices.
    """
    report: Object | None = None
    for item in _objects(daemon(context), job_id):
        report = item
        if "phase" in item and sys.stderr.isatty():
            print(f"\r\x1b[K{item['phase']} {item['done']}/{item['total']}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if report is None or "phase" in report:
        raise RlhfdError(f"the audit of job {job_id} ended without a report; see the daemon's log")
    if as_json:
        print_json(report)
    else:
        _print(report)


def _objects(asked: Daemon, job_id: int) -> Iterator[Object]:
    with asked.stream("POST", f"/jobs/{job_id}/audit", body=b"", timeout=SILENCE_SECONDS) as response:
        for line in response:
            item: Object = json.loads(line)
            if "error" in item:
                raise refusal(item["error"], item["exit_status"])
            yield item


def _print(report: Object) -> None:
    rows: list[Object] = report.get("per_version") or []
    if rows:
        columns = list(rows[0])
        print_table([c.upper().replace("_", " ") for c in columns], ([number(r[c], 6) for c in columns] for r in rows))
        print()
    print(f"{report['tokens']} tokens: mean error {number(report['mean_error'], 6)}, ", end="")
    print(f"max {number(report['max_error'], 6)} nats under the version named; ", end="")
    print(f"mean {number(report['neighbour_mean_error'], 6)} under its neighbour")
    print(f"{report['not_rederivable']} tokens can't be derived again")
