"""A job under a virtual clock: generator, scorer, learner and publication with random durations, drops and restarts.

The rules under test are handed in, so that mutants of them run in the same world. What goes wrong is a `BrokenError`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from rlhfd.core.overlap import LiveGroup, Pace, admissible, choose_step, deadline, overdue
from rlhfd.core.types import Ordinal, VersionStep


class BrokenError(AssertionError):
    """What a schedule showed: deadlock, bound, feasibility, twice, end."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(f"{what}: {detail}")
        self.what = what


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is under test."""

    admissible: Callable[..., int] = admissible
    choose_step: Callable[..., list[Ordinal] | None] = choose_step
    deadline: Callable[[VersionStep, int], VersionStep] = deadline
    version_goes_back: bool = False  # at a restart the generator starts with the checkpoint's weights


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How the machine behaves: mean durations in units of a generation, probabilities per event."""

    slots: int
    spread: float  # of the generation lengths: 0 all equal, 3 a very long tail
    learn: float
    publish: float
    drop: float
    restart: float
    save_steps: int


@dataclass
class Run:
    """What came out; `stale` counts groups by staleness of their oldest token."""

    admitted: int = 0
    trained: list[list[int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    restarts: int = 0


@dataclass
class _Group:
    ordinal: int
    due: int
    oldest: int | None = None  # least version of its tokens
    left: float = 0.0  # generation still to do
    since: float | None = None  # when its generation went on; None while it stands still
    complete: bool = False


class World:
    """One job from step 1 to the end; `run` raises BrokenError at the first thing that must not be."""

    def __init__(
        self,
        pace: Pace,
        weather: Weather,
        random: Random,
        rules: Rules | None = None,
        *,
        watch_feasibility: bool = True,
    ) -> None:
        self.watch_feasibility = watch_feasibility
        self.pace, self.weather, self.random, self.rules = pace, weather, random, rules or Rules()
        self.now = 0.0
        self.events: list[tuple[float, int, str, int]] = []
        self.tie = 0
        self.life = 0  # restarts make the events of the life before void
        self.live: dict[int, _Group] = {}
        self.start_version = 0  # V
        self.trained = 0  # newest version that the learner holds
        self.published = 0  # v, as the store has it
        self.publishing: int | None = None
        self.checkpoint = 0
        self.generator_up = True
        self.out = Run()

    def run(self) -> Run:
        self.wake()
        while self.trained < self.pace.max_steps:
            if not self.events:
                raise BrokenError(
                    "deadlock", f"V {self.start_version} v {self.published} live {list(self.live.values())}"
                )
            self.now, _, what, subject = heappop(self.events)
            life, _, kind = what.partition(" ")
            if int(life) != self.life:
                continue
            getattr(self, f"on_{kind}")(subject)
            if self.random.random() < self.weather.restart:
                self.restart()
            self.wake()
        self.check_end()
        return self.out

    def later(self, delay: float, kind: str, subject: int = 0) -> None:
        self.tie += 1
        heappush(self.events, (self.now + delay, self.tie, f"{self.life} {kind}", subject))

    # --- what happens ---------------------------------------------------------------------------------------------

    def on_generated(self, ordinal: int) -> None:
        if (group := self.live.get(ordinal)) is None:
            return  # dropped while it was generated
        group.left, group.since, group.complete = 0.0, None, True
        if self.random.random() < self.weather.drop:  # every reward of it failed
            del self.live[ordinal]
            self.out.dropped.append(ordinal)

    def on_learned(self, version: int) -> None:
        self.trained = version
        if version % self.weather.save_steps == 0:
            self.checkpoint = version
        if version < self.start_version:  # the replay of a recorded step: go on with the next
            self.later(self.duration(self.weather.learn), "learned", version + 1)

    def on_published(self, version: int) -> None:
        self.published, self.publishing = version, None

    def on_engine(self, _: int) -> None:
        self.generator_up = True

    def restart(self) -> None:
        """Everything dies. Kept: tokens so far, the recorded steps, v as stored, the newest checkpoint."""
        self.out.restarts += 1
        self.life += 1
        for group in self.live.values():
            if group.since is not None:
                group.left, group.since = max(group.left - (self.now - group.since), 1e-6), None
        self.trained, self.publishing, self.generator_up = self.checkpoint, None, False
        if self.rules.version_goes_back:
            self.published = self.checkpoint
        if self.trained < self.start_version:
            self.later(self.duration(self.weather.learn), "learned", self.trained + 1)

    # --- what is decided ------------------------------------------------------------------------------------------

    def wake(self) -> None:
        self.drop_overdue()
        self.admit()
        self.plan()
        self.admit()
        self.generate()
        self.publish()
        self.check_feasible()

    def admit(self) -> None:
        room = self.rules.admissible(
            len(self.live),
            self.pace,
            generator_version=VersionStep(self.published),
            start_version=VersionStep(self.start_version),
        )
        for _ in range(room):
            ordinal = self.out.admitted
            due = self.rules.deadline(VersionStep(self.published), self.pace.max_staleness)
            self.live[ordinal] = _Group(ordinal=ordinal, due=due, left=self.length())
            self.out.admitted += 1

    def plan(self) -> None:
        if self.trained < self.start_version or self.start_version >= self.pace.max_steps:
            return  # the learner is busy, or done
        chosen = self.rules.choose_step(self.groups(), self.pace, start_version=VersionStep(self.start_version))
        if chosen is None:
            return
        groups = [self.live.pop(ordinal) for ordinal in chosen]
        self.check_step(groups)
        self.out.trained.append([group.ordinal for group in groups])
        self.start_version += 1
        self.later(self.duration(self.weather.learn), "learned", self.start_version)

    def generate(self) -> None:
        """Slots go to the least (D, ordinal) first; what has one keeps it."""
        if not self.generator_up:
            if self.trained >= self.published and not any(e[2] == f"{self.life} engine" for e in self.events):
                self.later(self.duration(self.weather.publish), "engine")  # replay has reached the published version
            return
        waiting = [g for g in self.live.values() if not g.complete and g.since is None]
        free = self.weather.slots - sum(not g.complete and g.since is not None for g in self.live.values())
        for group in sorted(waiting, key=lambda g: (g.due, g.ordinal))[: max(free, 0)]:
            group.since = self.now
            group.oldest = self.published if group.oldest is None else min(group.oldest, self.published)
            self.later(group.left, "generated", group.ordinal)

    def publish(self) -> None:
        if self.generator_up and self.publishing is None and self.trained > self.published:
            self.publishing = self.trained
            self.later(self.duration(self.weather.publish), "published", self.trained)

    def drop_overdue(self) -> None:
        if self.pace.on_stale == "drop":
            for ordinal in overdue(self.groups(), start_version=VersionStep(self.start_version)):
                del self.live[ordinal]
                self.out.dropped.append(ordinal)

    def groups(self) -> list[LiveGroup]:
        return [
            LiveGroup(deadline=VersionStep(g.due), ordinal=Ordinal(g.ordinal), complete=g.complete)
            for g in self.live.values()
        ]

    def length(self) -> float:
        return self.random.lognormvariate(0.0, self.weather.spread)

    def duration(self, mean: float) -> float:
        return mean * self.random.random() * 2

    # --- what must hold -------------------------------------------------------------------------------------------

    def check_step(self, groups: list[_Group]) -> None:
        """Invariant 4, at consumption, on the tokens themselves and on the deadlines."""
        for group in groups:
            age = self.start_version - (group.oldest if group.oldest is not None else -1)
            if age > self.pace.max_staleness or group.due < self.start_version:
                raise BrokenError("bound", f"step from {self.start_version} holds {group}")
            self.out.stale.append(age)

    def check_feasible(self) -> None:
        """F(V): for every m >= V at most B(m - V + 1) live groups have D <= m, and none has D < V."""
        if self.pace.on_stale == "drop" or not self.watch_feasibility:
            return
        dues = sorted(group.due for group in self.live.values())
        if any(n >= self.pace.groups_per_step * (due - self.start_version + 1) for n, due in enumerate(dues)):
            raise BrokenError("feasibility", f"F({self.start_version}) fails for deadlines {dues}")

    def check_end(self) -> None:
        out = self.out
        trained = [ordinal for step in out.trained for ordinal in step]
        if len(out.trained) != self.pace.max_steps or any(len(s) != self.pace.groups_per_step for s in out.trained):
            raise BrokenError("end", f"{len(out.trained)} steps for {self.pace.max_steps}")
        if len(set(trained)) != len(trained) or set(trained) & set(out.dropped):
            raise BrokenError("twice", f"trained {sorted(trained)}, dropped {sorted(out.dropped)}")
        if sorted(trained + out.dropped) != list(range(out.admitted)):
            raise BrokenError("end", f"of {out.admitted} admitted, {sorted(self.live)} are left over")


def random_pace(random: Random) -> Pace:
    """Any job: B, K, the overcommit up to what K allows, 2 to 9 steps."""
    groups, staleness = random.randint(1, 4), random.choice((0, 1, 1, 2, 3, 4))
    return Pace(
        groups_per_step=groups,
        max_staleness=staleness,
        overcommit=random.randint(0, groups * staleness),
        max_steps=random.randint(2, 9),
        batch_order=random.choice(("first_complete", "first_complete", "fifo")),
    )


def random_weather(random: Random) -> Weather:
    """Any machine: few or many slots, any of the three the slowest, calm or full of restarts."""
    return Weather(
        slots=random.choice((1, 2, 4, 64)),
        spread=random.choice((0.0, 0.5, 1.0, 2.0)),
        learn=random.choice((0.01, 0.3, 1.0, 5.0)),
        publish=random.choice((0.0, 0.1, 1.0, 5.0)),
        drop=random.choice((0.0, 0.0, 0.1, 0.4)),
        restart=random.choice((0.0, 0.0, 0.02, 0.1)),
        save_steps=random.choice((1, 3)),
    )
