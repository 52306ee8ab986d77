"""Rewards of finished rollouts.

consumes     Score actions (a finished rollout)
produces     scored rollouts, or failed ones: a reward that raises, hangs or returns no number is an event and leaves
             its rollout out of the group, never a zero
waits for    the reward pool, within each reward's own timeout
unblocked by the end of a rollout; the k-th answer makes its group ready
"""

import asyncio

from rlhfd.core import wire
from rlhfd.core.plan import Score
from rlhfd.engines.rewards import RewardPool
from rlhfd.pipeline.context import Context
from rlhfd.store import chunks, rollouts


class Scorer:
    """Asks every reward for a rollout, all at once, and commits the weighted sum."""

    def __init__(self, context: Context, pool: RewardPool) -> None:
        self._context = context
        self._pool = pool
        self.up = asyncio.Event()  # the pool has a worker; one that has none yet knows no names
        self._weights = [reward.weight for reward in context.config.reward]

    async def score(self, action: Score) -> None:
        """One rollout: all parts and their weighted sum, or failed with the first error."""
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
        if failed is not None:
            await self._fail(action, failed)
            return
        parts = {name: answer.value or 0.0 for name, answer in zip(self._pool.names, answers, strict=True)}
        total = sum(weight * value for weight, value in zip(self._weights, parts.values(), strict=True))
        await rollouts.score_rollout(context.db, rollout.id, parts=parts, reward=total, text=answers[0].text)

    async def _fail(self, action: Score, answer: wire.Scored) -> None:
        name = self._pool.names[answer.reward]
        error = f"{name} ({answer.error_kind}): {answer.error}"
        await rollouts.fail_rollout(self._context.db, action.rollout.id, error)
