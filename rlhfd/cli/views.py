"""What a followed job looks like: a live bar on a terminal, lines in a file or pipe, JSON lines for programs."""

import sys
from collections import deque
from collections.abc import Sequence

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from rlhfd.cli.client import Object
from rlhfd.cli.curve import curve
from rlhfd.cli.follow import View
from rlhfd.cli.printing import console, harmless, number, print_json, seconds
from rlhfd.cli.show import event_line, print_steps, times, tokens_per_second

SHOWN_STEPS = 12
RECENT = 5  # steps that the estimate of the time left is made from


def view_for(*, as_json: bool) -> View:
    """The view that fits where the output goes."""
    if as_json:
        return JsonLines()
    return Bar() if sys.stderr.isatty() else Lines()


class JsonLines:
    """One metrics object a line, then the job's last status."""

    def update(self, _job: Object, _events: list[Object], steps: list[Object]) -> None:
        """Print the metrics; events are for people."""
        for step in steps:
            print_json(step)
        sys.stdout.flush()

    def ended(self, job: Object, _steps: list[Object]) -> None:
        """Print the status."""
        print_json(job)

    def close(self) -> None:
        """Nothing to undo."""


class Lines:
    """A line for each step, event and change of state, on stderr; the result on stdout."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._told = ""

    def update(self, job: Object, events: list[Object], steps: list[Object]) -> None:
        """Print what is new."""
        for event in events:
            self._say(event_line(event))
        for step in steps:
            self._pace.add(step)
            self._say(self._pace.line(job["max_steps"]))
        told = standing(job)
        if told != self._told:
            self._say(told)
        self._told = told

    def ended(self, job: Object, steps: list[Object]) -> None:
        """Print the table and the curve."""
        summary(job, steps)

    def close(self) -> None:
        """Nothing to undo."""

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Bar:
    """A live line: where the job stands, a bar, reward, speed and the time left. Events stay above it."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[pace]}"))
        self._progress = Progress(*columns, console=console(stderr=True), refresh_per_second=4)
        self._task: TaskID = self._progress.add_task("starting", total=None, pace="")
        self._pace = Pace()
        self._progress.start()

    def update(self, job: Object, events: list[Object], steps: list[Object]) -> None:
        """Print the events above the bar and move it."""
        for event in events:
            self._progress.console.print(event_line(event), style="dim")
        for step in steps:
            self._pace.add(step)
        most = job["max_steps"]
        self._progress.update(
            self._task, description=standing(job), total=most, completed=job["step"], pace=self._pace.line(most)
        )

    def ended(self, job: Object, steps: list[Object]) -> None:
        """Print the table and the curve."""
        summary(job, steps)

    def close(self) -> None:
        """Stop drawing."""
        self._progress.stop()


class Pace:
    """How fast it goes, from the last few steps."""

    def __init__(self) -> None:
        self._recent: deque[Object] = deque(maxlen=RECENT)

    def add(self, step: Object) -> None:
        """Take in one more step."""
        self._recent.append(step)

    def line(self, max_steps: int) -> str:
        """Step, reward, tokens/s, time left; empty before the first step."""
        if not self._recent:
            return ""
        last = self._recent[-1]
        shown = [f"step {last['step']}/{max_steps}", f"reward {number(last['reward_mean'])}"]
        rate = tokens_per_second(last)
        if rate is not None:
            shown.append(f"{rate:.0f} tokens/s")
        left = self.time_left(max_steps)
        if left is not None:
            shown.append(f"{seconds(left)} left")
        return "  ".join(shown)

    def time_left(self, max_steps: int) -> float | None:
        """Seconds, at the mean of the last steps; None before it can be said."""
        spans = [t for s in self._recent if (t := times(s).get("total")) is not None]
        if not spans:
            return None
        return (max_steps - self._recent[-1]["step"]) * sum(spans) / len(spans)


def standing(job: Object) -> str:
    """State and phase in a few words."""
    phase = job.get("phase")
    return harmless(f"job {job['id']} {job['state']}" + (f": {phase}" if phase else ""))


def summary(job: Object, steps: Sequence[Object]) -> None:
    """A table of at most SHOWN_STEPS steps, evenly spread, and the curve of the mean reward."""
    if steps:
        print_steps(spread(steps, SHOWN_STEPS))
        rewards = [step["reward_mean"] for step in steps if step["reward_mean"] is not None]
        print(f"\nmean reward, steps {steps[0]['step']} to {steps[-1]['step']}")
        print("\n".join(curve(rewards)))
    print(f"job {job['id']} ({job['name']}) is {job['state']} after step {job['step']} of {job['max_steps']}")


def spread(steps: Sequence[Object], most: int) -> list[Object]:
    """At most `most` of the steps, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]
