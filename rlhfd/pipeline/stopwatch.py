"""Where a step's time goes, as the learner sees it: waiting for rollouts, waiting for scores, or working."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from rlhfd.core.plan import View
from rlhfd.core.types import RolloutState

Phase: TypeAlias = Literal["wait_rollouts", "wait_scores", "work"]

_GENERATING = {RolloutState.PENDING, RolloutState.GENERATING, RolloutState.PARTIAL}


def waits_for(view: View) -> Phase:
    """`work` while a step is recorded or the learner is in a call; `wait_scores` where only scores are missing."""
    if view.recorded is not None or view.learning or not view.learner.ready:
        return "work"
    states = [rollout.state for group in view.groups for rollout in group.rollouts]
    unfinished = any(state in _GENERATING for state in states)
    unscored = any(state is RolloutState.FINISHED for state in states)
    return "wait_scores" if unscored and not unfinished else "wait_rollouts"


class Stopwatch:
    """Adds up seconds by phase between two laps; a lap ends with the record of a step."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._phase: Phase = "wait_rollouts"
        self._since = self._lap_start = now()
        self._sums: dict[Phase, float] = {}

    def switch(self, phase: Phase) -> None:
        """The phase from now on."""
        now = self._now()
        self._sums[self._phase] = self._sums.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def lap(self) -> dict[str, float]:
        """Seconds {total, wait_rollouts, wait_scores, publish} since the last lap; publish is filled in when known."""
        self.switch(self._phase)
        total, self._lap_start = self._since - self._lap_start, self._since
        sums, self._sums = self._sums, {}
        return {
            "total": total,
            "wait_rollouts": sums.get("wait_rollouts", 0.0),
            "wait_scores": sums.get("wait_scores", 0.0),
            "publish": 0.0,
        }
