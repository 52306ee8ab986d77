"""What a step is before it is learned, and whether a replay made it again."""

from dataclasses import replace
from statistics import mean, stdev

import pytest

from rlhfd.config import parse_job
from rlhfd.core.ledger import LOSS_TOLERANCE, NORM_TOLERANCE, draft, reproduces, step_seed
from rlhfd.core.types import Group, GroupId, GroupState, Ordinal, Rollout, RolloutId, RolloutState, VersionStep
from rlhfd.core.wire import Fingerprint

PROMPT = 10  # tokens


def config(**changes):
    spec = {
        "job": {"name": "t", "seed": 7, "max_steps": 10},
        "model": {"model_name_or_path": "/m", "dtype": "float32"},
        "data": {"source": "jsonl:p.jsonl"},
        "reward": [{"type": "function", "path": "r.py:f"}],
        "rollout": {"groups_per_step": 2, "num_generations": 3, "max_completion_length": 32},
        "learner": {"learning_rate": 1e-3},
    }
    for section, keys in changes.items():
        spec[section] = {**spec.get(section, {}), **keys}
    return parse_job(spec)


def group(ordinal: int, *rewards: float | None, lengths: list[int] | None = None, finish: str = "stop") -> Group:
    """Rollout k of group n has the id 10 n + k."""
    return Group(
        id=GroupId(100 + ordinal),
        ordinal=Ordinal(ordinal),
        row=ordinal,
        deadline=VersionStep(4),
        state=GroupState.READY,
        rollouts=tuple(
            Rollout(
                id=RolloutId(10 * ordinal + k),
                group_id=GroupId(100 + ordinal),
                k=k,
                state=RolloutState.FAILED if reward is None else RolloutState.SCORED,
                n_tokens=lengths[k] if lengths else 5,
                finish=finish,
                reward=reward,
            )
            for k, reward in enumerate(rewards)
        ),
    )


def drawn(*groups: Group, step: int = 1, **changes):
    return draft(groups, {g.row: PROMPT for g in groups}, config(**changes), step)


def test_a_step_holds_its_groups_and_scored_rollouts_in_training_order():
    made = drawn(group(1, 0.0, 1.0, 2.0), group(4, 1.0, None, 0.0))
    assert made.groups == (101, 104)
    assert [r.rollout_id for r in made.rollouts] == [10, 11, 12, 40, 42]


def test_the_same_groups_give_the_same_record():
    groups = (group(0, 0.0, 1.0), group(1, 1.0, 0.0))
    assert drawn(*groups) == drawn(*groups)


def test_the_seed_is_the_steps_own():
    assert len({step_seed(7, n) for n in range(100)} | {step_seed(8, n) for n in range(100)}) == 200
    assert all(0 <= step_seed(seed, 3) < 2**31 for seed in range(100))
    assert drawn(group(0, 0.0, 1.0), group(1, 1.0, 0.0), step=3).seed == step_seed(7, 3)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_follow_scale_rewards(scale):
    rewards = [[0.0, 1.0, 5.0], [2.0, 3.0, 4.0]]
    made = drawn(group(0, *rewards[0]), group(1, *rewards[1]), algorithm={"scale_rewards": scale})
    everything = [r for group_rewards in rewards for r in group_rewards]
    for number, values in enumerate(rewards):
        divisor = {"group": stdev(values) + 1e-4, "batch": stdev(everything) + 1e-4, "none": 1.0}[scale]
        wanted = [(r - mean(values)) / divisor for r in values]
        found = [r.advantage for r in made.rollouts if r.group_id == 100 + number]
        assert found == pytest.approx(wanted)


def test_an_unscored_rollout_is_in_no_baseline():
    made = drawn(group(0, 0.0, None, 1.0), group(1, 1.0, 0.0))
    assert [r.advantage for r in made.rollouts if r.group_id == 100] == pytest.approx([-0.7070, 0.7070], abs=1e-3)


def test_equal_rewards_are_skipped_with_advantages_of_exactly_zero_and_counted():
    made = drawn(group(0, 0.7, 0.7, 0.7), group(1, 0.0, 1.0, 0.5))
    equal = [r for r in made.rollouts if r.group_id == 100]
    assert [(r.advantage, r.skipped, r.masked) for r in equal] == [(0.0, True, False)] * 3
    assert (made.settings.n_sequences, made.settings.n_tokens) == ([6], [30])


def test_truncated_rollouts_are_masked_where_asked_count_in_n_and_not_in_t():
    cut = group(0, 0.0, 1.0, 0.5, finish="length")
    made = drawn(cut, group(1, 0.0, 1.0, 0.5), algorithm={"mask_truncated_completions": True})
    masked = [r for r in made.rollouts if r.masked]
    assert {r.group_id for r in masked} == {100}
    assert all(r.skipped for r in masked)
    assert (made.settings.n_sequences, made.settings.n_tokens) == ([6], [15])
    assert not any(r.masked for r in drawn(cut, group(1, 0.0, 1.0, 0.5)).rollouts)


def test_n_and_t_are_counted_per_minibatch_and_groups_stay_whole():
    groups = [group(n, 0.0, 1.0, lengths=[n + 1, n + 2]) for n in range(4)]
    made = drawn(*groups, algorithm={"minibatches": 2})
    placed = {r.group_id: r.minibatch for r in made.rollouts}
    assert len({(r.group_id, r.minibatch) for r in made.rollouts}) == 4
    for number in (0, 1):
        members = [r for r in made.rollouts if r.minibatch == number]
        assert made.settings.n_sequences[number] == len(members) == 4
        tokens = sum(2 * (g.ordinal + 1) + 1 for g in groups if placed[g.id] == number)
        assert made.settings.n_tokens[number] == tokens


def test_there_are_no_more_minibatches_than_groups():
    made = drawn(
        *(group(0, 0.0, 1.0), group(1, 0.0, 1.0)),
        rollout={"groups_per_step": 8},
        algorithm={"minibatches": 8, "num_iterations": 3},
    )
    assert made.settings.minibatches == 2
    assert len(made.settings.learning_rates) == 6


def test_the_values_in_force_are_written_down():
    made = drawn(
        *(group(0, 0.0, 1.0), group(1, 0.0, 1.0)),
        step=2,
        algorithm={"epsilon": 0.1},
        learner={"learning_rate": 1e-3, "warmup_steps": 4, "lr_scheduler_type": "constant_with_warmup"},
        rollout={"temperature": 0.8},
    )
    assert made.settings.learning_rates == [pytest.approx(1e-3 * 2 / 4)]
    assert (made.settings.epsilon, made.settings.epsilon_high, made.settings.temperature) == (0.1, 0.1, 0.8)
    assert made.settings.max_completion_length == 32


def test_epsilon_high_and_the_coupled_loss_are_told():
    made = drawn(
        *(group(0, 0.0, 1.0), group(1, 0.0, 1.0)), algorithm={"epsilon_high": 0.28, "use_decoupled_loss": False}
    )
    assert (made.settings.epsilon_high, made.settings.prox_logp_method) == (0.28, "none")


class TestAReplay:
    PRINT = Fingerprint(losses=[0.5, 0.25], grad_norms=[1.0, 2.0], skipped=[False, True], policy="a", optimizer="b")

    def changed(self, **changes) -> Fingerprint:
        return Fingerprint(**{name: getattr(self.PRINT, name) for name in self.PRINT.__struct_fields__} | changes)

    @pytest.mark.parametrize("exact", [True, False])
    def test_of_the_same_reproduces(self, exact):
        assert reproduces(self.PRINT, self.changed(), exact=exact)

    @pytest.mark.parametrize(
        "change", [{"policy": "c"}, {"optimizer": "c"}, {"losses": [0.5, 0.25000001]}, {"grad_norms": [1.0, 2.0000001]}]
    )
    def test_on_a_cpu_differs_in_any_bit(self, change):
        assert not reproduces(self.PRINT, self.changed(**change), exact=True)

    def test_on_a_gpu_may_differ_within_the_tolerances(self):
        near = self.changed(policy="c", losses=[0.5 * (1 + LOSS_TOLERANCE / 2), 0.25], grad_norms=[1.0, 2.01])
        assert reproduces(self.PRINT, near, exact=False)

    @pytest.mark.parametrize(
        "change",
        [
            {"losses": [0.5 * (1 + 2 * LOSS_TOLERANCE), 0.25]},
            {"grad_norms": [1.0, 2.0 * (1 + 2 * NORM_TOLERANCE)]},
            {"losses": [0.5]},
            {"losses": [0.5, float("nan")]},
            {"skipped": [False, False]},
        ],
    )
    def test_on_a_gpu_does_not_reproduce_beyond_them(self, change):
        assert not reproduces(self.PRINT, self.changed(**change), exact=False)


def test_a_scored_rollout_is_needed_for_a_reward():
    bare = replace(group(0, 0.0, 1.0), rollouts=())
    made = drawn(bare, group(1, 0.0, 1.0))
    assert {r.group_id for r in made.rollouts} == {101}
