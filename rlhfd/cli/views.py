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

    def event(self, _event: Object) -> None:
        """Events are for people."""

    def step(self, step: Object) -> None:
        """Print the metrics."""
        print_json(step)
        sys.stdout.flush()

    def status(self, _job: Object) -> None:
        """The last one is printed by `ended`."""

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

    def event(self, event: Object) -> None:
        """Print it."""
        self._say(event_line(event))

    def step(self, step: Object) -> None:
        """Print reward, speed and the time left."""
        self._pace.add(step)
        self._say(self._pace.line())

    def status(self, job: Object) -> None:
        """Print a state or phase that is new."""
        self._pace.max_steps = job["max_steps"]
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

    def event(self, event: Object) -> None:
        """Print it above the bar."""
        self._progress.console.print(event_line(event), style="dim")

    def step(self, step: Object) -> None:
        """Move the bar."""
        self._pace.add(step)

    def status(self, job: Object) -> None:
        """Say where the job stands."""
        self._pace.max_steps = job["max_steps"]
        self._progress.update(
            self._task,
            description=standing(job),
            total=job["max_steps"],
            completed=job["step"],
            pace=self._pace.line(),
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
        self.max_steps = 0
        self._recent: deque[Object] = deque(maxlen=RECENT)

    def add(self, step: Object) -> None:
        """Take in one more step."""
        self._recent.append(step)

    def line(self) -> str:
        """Step, reward, tokens/s, time left; empty before the first step."""
        if not self._recent:
            return ""
        last = self._recent[-1]
        shown = [f"step {last['step']}/{self.max_steps or '?'}", f"reward {number(last['reward_mean'])}"]
        rate = tokens_per_second(last)
        if rate is not None:
            shown.append(f"{rate:.0f} tokens/s")
        left = self.time_left()
        if left is not None:
            shown.append(f"{seconds(left)} left")
        return "  ".join(shown)

    def time_left(self) -> float | None:
        """Seconds, at the mean of the last steps; None before it can be said."""
        spans = [t for s in self._recent if (t := times(s).get("total")) is not None]
        if not spans or not self.max_steps:
            return None
        return (self.max_steps - self._recent[-1]["step"]) * sum(spans) / len(spans)


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
