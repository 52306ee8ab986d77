"""Rewards of finished rollouts.

consumes     Score actions (a finished rollout)
produces     scored rollouts, or failed ones: a reward that raises, hangs or returns no number is an event and leaves
             its rollout out of the group, never a zero
waits for    the reward pool, within each reward's own timeout
unblocked by the end of a rollout; the k-th answer makes its group ready

Groups without enough rewards are dropped and others take their place. `DROPS` steps' worth of them in a row, with no
group completed in between, mean that the rewards don't work: the job fails, rather than spin for ever.
"""

import asyncio
import math

import msgspec

from rlhfd.core import wire
from rlhfd.core.plan import Score
from rlhfd.core.types import GroupState
from rlhfd.engines.rewards import RewardPool
from rlhfd.errors import RewardError
from rlhfd.pipeline.context import Context
from rlhfd.store import chunks, rollouts

DROPS = 2  # times groups_per_step


class Scorer:
    """Asks every reward for a rollout, all at once, and commits the weighted sum."""

    def __init__(self, context: Context, pool: RewardPool) -> None:
        self._context = context
        self._pool = pool
        self.up = asyncio.Event()  # the pool has a worker; one that has none yet knows no names
        self._weights = [reward.weight for reward in context.config.reward]
        self._limit = DROPS * context.config.rollout.groups_per_step
        self._dropped = 0  # groups in a row
        self._last: wire.Scored | None = None  # the newest answer without a value

    async def score(self, action: Score) -> None:
        """One rollout: all parts and their weighted sum, or failed with the first error.

        Raises RewardError where too many groups in a row had to be dropped.
        """
        await self.up.wait()
        context, rollout = self._context, action.rollout
        tokens = await chunks.tokens(context.db, rollout.id)
        prompt = context.snapshot.row(action.group.row)
        calls = [
            wire.Score(
                rollout_id=rollout.id,
                reward=number,
                prompt=prompt.text,
                tokens=tokens,
                columns=prompt.columns,
                truncated=rollout.finish == "length",
            )
            for number in range(len(self._weights))
        ]
        answers = await asyncio.gather(*(self._pool.score(call) for call in calls))
        failed = next((answer for answer in answers if answer.value is None), None)
        if failed is None:
            values = [answer.value for answer in answers if answer.value is not None]  # all: none has failed
            parts = dict(zip(self._pool.names, values, strict=True))
            total = sum(weight * value for weight, value in zip(self._weights, values, strict=True))
            if math.isfinite(total):
                await self._scored(action, parts, total, answers[0].text)
                return
            why = f"the weighted sum of {parts} is not finite"
            failed = msgspec.structs.replace(answers[0], value=None, error_kind="not_finite", error=why)
        self._settled(await self._fail(action, failed))

    async def _scored(self, action: Score, parts: dict[str, float], total: float, text: str) -> None:
        db, rollout = self._context.db, action.rollout
        self._settled(await rollouts.score_rollout(db, rollout.id, parts=parts, reward=total, text=text))

    async def _fail(self, action: Score, answer: wire.Scored) -> GroupState:
        self._last = answer
        return await rollouts.fail_rollout(self._context.db, action.rollout.id, self._told(answer))

    def _told(self, answer: wire.Scored) -> str:
        return f"{self._pool.names[answer.reward]} ({answer.error_kind}): {answer.error}"

    def _settled(self, group: GroupState) -> None:
        """Count groups dropped in a row; one that is complete ends the row."""
        if group is GroupState.READY:
            self._dropped = 0
        if group is not GroupState.DROPPED or self._last is None:
            return
        self._dropped += 1
        if self._dropped >= self._limit:
            raise RewardError(
                f"{self._dropped} groups in a row had fewer than 2 rollouts with a reward and were dropped; the last "
                f"error was {self._told(self._last)}; mend the reward and submit the job again",
                kind=self._last.error_kind,
            )
