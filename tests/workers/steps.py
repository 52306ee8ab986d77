"""Steps for a learner to learn: rollouts of a tiny model, made-up log-probs near its own, frames around them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from rlhfd.core import wire
from rlhfd.workers.batch import Rollout, read_rollouts
from rlhfd.workers.model import Policy
from rlhfd.workers.publication import Reference, rounded
from rlhfd.workers.session import Session

VOCABULARY = 512
TEMPERATURE = 0.8


def ints(values: Sequence[int]) -> bytes:
    return array("i", values).tobytes()


def floats(values: Sequence[float]) -> bytes:
    return array("f", values).tobytes()


def read_floats(data: bytes) -> list[float]:
    return array("f", data).tolist()


def read_ints(data: bytes) -> list[int]:
    return array("i", data).tolist()


def learner_settings(**changes: Any) -> wire.LearnerSettings:
    return wire.LearnerSettings(**{"dtype": "float32", "seed": 3} | changes)


def load_frame(model: Path, checkpoint: Path | None = None, **changes: Any) -> wire.Load:
    return wire.Load(
        model_dir=str(model),
        checkpoint_dir=None if checkpoint is None else str(checkpoint),
        settings=learner_settings(**changes),
        threads=1,
    )


def session_of(model: Path, checkpoint: Path | None = None, **changes: Any) -> Session:
    return Session(load_frame(model, checkpoint, **changes), silent)


def silent(_phase: str, _done: int, _total: int) -> None:
    """A heartbeat that nobody hears."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A rollout as a test thinks of it."""

    id: int
    prompt: list[int]
    tokens: list[int]
    logps: list[float]
    versions: list[int]
    advantage: float
    minibatch: int = 0
    micro_batch: int = 0
    masked: bool = False
    skipped: bool = False

    def frame(self) -> wire.RolloutFrame:
        return wire.RolloutFrame(
            id=self.id,
            prompt=ints(self.prompt),
            tokens=ints(self.tokens),
            logps=floats(self.logps),
            versions=ints(self.versions),
            advantage=self.advantage,
            minibatch=self.minibatch,
            micro_batch=self.micro_batch,
            masked=self.masked,
            skipped=self.skipped,
        )


def make_rollouts(policy: Policy, *, version: int, count: int = 6, seed: int = 0, noise: float = 0.2) -> list[Made]:
    """Random completions; behaviour log-probs are the policy's own plus noise; versions rise to `version`."""
    random = Random(seed)
    blank: list[Made] = []
    for number in range(count):
        length = random.randint(3, 9)
        blank.append(
            Made(
                id=100 + number,
                prompt=[random.randrange(4, VOCABULARY) for _ in range(random.randint(2, 6))],
                tokens=[random.randrange(4, VOCABULARY) for _ in range(length)],
                logps=[0.0] * length,
                versions=sorted(random.randint(max(version - 3, 0), version) for _ in range(length)),
                advantage=random.gauss(0, 1),
            )
        )
    own = own_logps(policy, blank)
    return [replace(r, logps=[x + random.gauss(0, noise) for x in own[r.id]]) for r in blank]


def own_logps(policy: Policy, rollouts: Sequence[Made], temperature: float = TEMPERATURE) -> dict[int, list[float]]:
    """The policy's log-probs in float32."""
    reference = Reference(policy, rounded(policy, torch.float32))
    found = reference.completions(as_read(rollouts), temperature)
    return {rollout_id: logps.tolist() for rollout_id, logps in found.items()}


def as_read(rollouts: Sequence[Made]) -> list[Rollout]:
    return read_rollouts(group_frames(rollouts))


def group_frames(rollouts: Sequence[Made]) -> list[wire.GroupFrame]:
    """Pairs of rollouts make a group."""
    return [
        wire.GroupFrame(ordinal=at // 2, rollouts=[r.frame() for r in rollouts[at : at + 2]])
        for at in range(0, len(rollouts), 2)
    ]


def step_settings(rollouts: Sequence[Made], **changes: Any) -> wire.StepSettings:
    minibatches = 1 + max(r.minibatch for r in rollouts)
    members = [[r for r in rollouts if r.minibatch == number] for number in range(minibatches)]
    values: dict[str, Any] = {
        "loss_type": "dapo",
        "prox_logp_method": "loglinear",
        "zero_staleness": "behave",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": None,
        "behave_weight_cap": 5.0,
        "behave_weight_mode": "token_truncate",
        "temperature": TEMPERATURE,
        "max_grad_norm": 1.0,
        "minibatches": minibatches,
        "num_iterations": 1,
        "n_sequences": [len(group) for group in members],
        "n_tokens": [sum(len(r.tokens) for r in group if not r.masked) for group in members],
        "max_completion_length": 16,
    } | changes
    values.setdefault("learning_rates", [1e-3] * (values["minibatches"] * values["num_iterations"]))
    return wire.StepSettings(**values)


def learn_frame(rollouts: Sequence[Made], step: int, *, trace: Sequence[int] = (), **changes: Any) -> wire.Learn:
    return wire.Learn(
        step=step,
        version_in=step - 1,
        groups=len(group_frames(rollouts)),
        settings=step_settings(rollouts, **changes),
        trace=list(trace),
    )


def learn(session: Session, rollouts: Sequence[Made], *, trace: Sequence[int] = (), **changes: Any) -> wire.Learned:
    """The session's next step over these rollouts."""
    step = session.loaded().step + 1
    return session.learn(learn_frame(rollouts, step, trace=trace, **changes), group_frames(rollouts))


def parameters(session: Session) -> dict[str, torch.Tensor]:
    """Copies of what is trained."""
    return {name: p.detach().clone() for name, p in session.policy.trainable().items()}
