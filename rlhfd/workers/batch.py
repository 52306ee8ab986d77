"""From group frames to padded tensors: the micro-batches of a step as the daemon placed them.

Everything per token has the completion's own index t, so versions, mask and log-probs can't slip against each other;
only `Inputs.columns` knows that token t is predicted at position P + t - 1.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhfd.core import wire
from rlhfd.workers.model import Inputs


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One rollout's tensors, on the CPU: prompt int64 [P], tokens int64 [T], behave float32 [T], versions int64 [T]."""

    id: int
    prompt: Tensor
    tokens: Tensor
    behave: Tensor
    versions: Tensor
    advantage: float
    minibatch: int
    micro_batch: int
    masked: bool
    skipped: bool

    @property
    def trained(self) -> bool:
        """It is forwarded: something of it reaches the loss."""
        return not self.skipped and not self.masked and len(self.tokens) > 0


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rollouts, right-padded to the longest. mask bool, behave float32, versions int64: [B, T]; advantages [B]."""

    rollouts: Sequence[Rollout]
    inputs: Inputs
    mask: Tensor
    behave: Tensor
    versions: Tensor
    advantages: Tensor

    def padded(self, flat: Tensor) -> Tensor:
        """Values per predicted token [n] as [B, T], 0 where there is none; gradients go through."""
        return torch.zeros_like(self.mask, dtype=flat.dtype).masked_scatter(self.mask, flat)


def read_rollouts(groups: Sequence[wire.GroupFrame]) -> list[Rollout]:
    """In the order of the frames. Raises ValueError where a rollout's arrays do not fit each other."""
    return [_rollout(frame) for group in groups for frame in group.rollouts]


def _rollout(frame: wire.RolloutFrame) -> Rollout:
    rollout = Rollout(
        id=frame.id,
        prompt=_array(frame.prompt, torch.int32).long(),
        tokens=_array(frame.tokens, torch.int32).long(),
        behave=_array(frame.logps, torch.float32),
        versions=_array(frame.versions, torch.int32).long(),
        advantage=frame.advantage,
        minibatch=frame.minibatch,
        micro_batch=frame.micro_batch,
        masked=frame.masked,
        skipped=frame.skipped,
    )
    lengths = {len(rollout.tokens), len(rollout.behave), len(rollout.versions)}
    if len(lengths) > 1 or not len(rollout.prompt):
        raise ValueError(f"rollout {frame.id} has a prompt of {len(rollout.prompt)} tokens and arrays of {lengths}")
    return rollout


def _array(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def micro_batches(rollouts: Sequence[Rollout], minibatch: int, device: torch.device) -> Iterator[MicroBatch]:
    """Those of one minibatch, as placed, without the rollouts that are not trained."""
    placed: defaultdict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.minibatch == minibatch and rollout.trained:
            placed[rollout.micro_batch].append(rollout)
    for number in sorted(placed):
        yield collate(placed[number], device)


def collate(rollouts: Sequence[Rollout], device: torch.device) -> MicroBatch:
    """Pad and align. Each rollout has at least one completion token."""
    lengths = torch.tensor([len(r.tokens) for r in rollouts])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    rows, t = mask.nonzero(as_tuple=True)
    prompts = torch.tensor([len(r.prompt) for r in rollouts])
    inputs = Inputs(
        ids=_padded([torch.cat((r.prompt, r.tokens[:-1])) for r in rollouts]).to(device),
        rows=rows.to(device),
        columns=(prompts[rows] + t - 1).to(device),
        targets=torch.cat([r.tokens for r in rollouts]).to(device),
    )
    return MicroBatch(
        rollouts=rollouts,
        inputs=inputs,
        mask=mask.to(device),
        behave=_padded([r.behave for r in rollouts]).to(device),
        versions=_padded([r.versions for r in rollouts]).to(device),
        advantages=torch.tensor([r.advantage for r in rollouts], dtype=torch.float32, device=device),
    )


def _padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
