"""The few rollouts a step that are shown, and what is told of them."""

import json
from array import array

from rlhfd.core.types import Group, GroupId, GroupState, Ordinal, Rollout, RolloutId, RolloutState, VersionStep
from rlhfd.core.wire import TokenTrace
from rlhfd.pipeline.samples import SAMPLES, describe, worth_showing
from tests.pipeline.test_learn import record
from tests.pipeline.workshop import EOS, Workshop


def rollout(number: int, **facts) -> Rollout:
    values = {"state": RolloutState.SCORED, "n_tokens": 5, "reward": 0.5, **facts}
    return Rollout(id=RolloutId(number), group_id=GroupId(1), k=number, **values)


def shown(*rollouts: Rollout) -> list[int]:
    group = Group(
        id=GroupId(1), ordinal=Ordinal(0), row=0, deadline=VersionStep(0), state=GroupState.READY, rollouts=rollouts
    )
    return worth_showing([group])


class TestWorthShowing:
    def test_are_best_worst_and_longest(self):
        found = shown(rollout(1), rollout(2, reward=1.0), rollout(3, reward=0.0), rollout(4, n_tokens=9), rollout(5))
        assert found == [2, 3, 4, 1]

    def test_continued_ones_come_first_by_their_versions_then_resumes(self):
        spans = [rollout(n, min_step=VersionStep(0), max_step=VersionStep(n % 3)) for n in range(1, 6)]
        found = shown(*spans, rollout(6, resumes=2), rollout(7, reward=1.0))
        assert found == [2, 5, 1, 7]
        assert len(found) == SAMPLES

    def test_is_none_without_a_reward(self):
        assert shown(rollout(1, reward=None, state=RolloutState.FAILED)) == []

    def test_is_each_once_where_there_are_few(self):
        assert shown(rollout(1)) == [1]


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


async def test_a_sample_tells_a_tokens_whole_story(shop: Workshop):
    step = await record(shop)
    use = step.rollouts[1]
    trace = TokenTrace(
        rollout_id=use.rollout_id,
        staleness=array("i", [0, 1]).tobytes(),
        alpha=floats(1.0, 0.5),
        policy=floats(-1.0, -2.0),
        prox=floats(-1.5, -2.5),
        weight=floats(1.0, 1.25),
        ratio=floats(1.0, 0.75),
    )
    ((number, sample),) = (await describe(shop.context, step, [trace])).items()
    assert number == use.rollout_id
    assert (sample["step"], sample["ordinal"], sample["k"], sample["resumes"]) == (1, 0, 1, 0)
    assert (sample["prompt"], sample["completion"], sample["finish"]) == (json.dumps("say 0"), "text", "stop")
    assert (sample["tokens"], sample["version_steps"], sample["behaviour_logps"]) == ([5, EOS], [0, 0], [-0.5, -0.25])
    assert (sample["staleness"], sample["alpha"], sample["ratio"]) == ([0, 1], [1.0, 0.5], [1.0, 0.75])
    assert (sample["reward"], sample["reward_parts"], sample["advantage"]) == (1.0, {"r": 1.0}, use.advantage)


async def test_without_traces_nothing_is_read(shop: Workshop):
    assert await describe(shop.context, await record(shop), []) == {}
