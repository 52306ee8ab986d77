"""The learner's calls on what it holds in memory: policy, optimiser, and the number of the version that they are."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rlhfd.core import wire
from rlhfd.workers import checkpoint, publication
from rlhfd.workers.batch import read_rollouts
from rlhfd.workers.model import load_policy
from rlhfd.workers.numerics import numerics
from rlhfd.workers.optimizer import Optimizer
from rlhfd.workers.step import Heartbeat, LearnerStep


class Session:
    """Made by a `wire.Load`; lives until the process ends or loads again."""

    def __init__(self, load: wire.Load, heartbeat: Heartbeat) -> None:
        torch.set_num_threads(load.threads)
        self._heartbeat = heartbeat
        self._settings = load.settings
        self._model_dir = Path(load.model_dir)
        self.policy = load_policy(self._model_dir, load.settings)
        heartbeat("load", 1, 2)
        self.optimizer = Optimizer(self.policy.trainable(), load.settings)
        self._step = 0
        self._lost = ""
        self._last_published: dict[str, torch.Tensor] | None = None
        if load.checkpoint_dir is not None:
            weights, state = self.policy.trainable(), self.optimizer.state()
            self._step = checkpoint.load_into(Path(load.checkpoint_dir), weights, state).step
        heartbeat("load", 2, 2)

    def loaded(self) -> wire.Loaded:
        """What is in memory now."""
        every = [p for _, p in self.policy.causal.named_parameters()]
        return wire.Loaded(
            step=self._step,
            parameters=sum(p.numel() for p in every),
            trainable=sum(p.numel() for p in every if p.requires_grad),
            numerics=numerics(self._settings, self.policy.device),
        )

    def learn(self, frame: wire.Learn, groups: Sequence[wire.GroupFrame]) -> wire.Learned:
        """One step. Raises NonFiniteError, OutOfMemoryError …, and is then what it was before."""
        self._need_whole()
        if (frame.version_in, frame.step) != (self._step, self._step + 1):
            raise ValueError(f"step {frame.step} from version {frame.version_in} asked of version {self._step}")
        taken = self.optimizer.taken
        try:
            learned = LearnerStep(self.policy, self.optimizer, frame, groups, self._heartbeat).run()
        except BaseException as error:
            if self.optimizer.taken != taken:
                self._lost = f"step {frame.step} failed after its update: {error}"
            raise
        self._step = frame.step
        return learned

    def publish(self, frame: wire.Publish) -> wire.Published:
        """Write what the generator shall load, and the reference log-probs of the canary."""
        self._need_whole()
        tensors = publication.rounded(self.policy, self.policy.dtype, frame.noise_seed)
        self._heartbeat("publish", 1, 3)
        nbytes = publication.publish(Path(frame.dir), self.policy, tensors, self._model_dir)
        self._heartbeat("publish", 2, 3)
        changed = publication.changed_share(tensors, self._last_published)
        reference = publication.Reference(self.policy, tensors)
        canary = [_float32(reference.sequence(_int32(data))) for data in frame.canary]
        if frame.noise_seed is None:
            self._last_published = tensors
        return wire.Published(step=self._step, changed=changed, nbytes=nbytes, canary=canary)

    def checkpoint(self, frame: wire.Checkpoint) -> wire.Checkpointed:
        """Durable when it returns."""
        self._need_whole()
        weights, state = self.policy.trainable(), self.optimizer.state()
        return checkpoint.write(Path(frame.dir), frame=frame, step=self._step, weights=weights, optimizer=state)

    def logprobs(self, frame: wire.LogProbs, groups: Sequence[wire.GroupFrame]) -> wire.LogProbsReply:
        """Of stored tokens, under the published tensors of the weights in memory."""
        self._need_whole()
        tensors = publication.rounded(self.policy, self.policy.dtype)
        found = publication.Reference(self.policy, tensors).completions(read_rollouts(groups), frame.temperature)
        return wire.LogProbsReply(logps={rollout_id: _float32(logps) for rollout_id, logps in found.items()})

    def export(self, frame: wire.Export) -> wire.Done:
        """Write the plain model."""
        self._need_whole()
        publication.export(Path(frame.dir), self.policy, self._model_dir)
        return wire.Done()

    def after_fault(self) -> None:
        """Give back what a failed call still holds."""
        self.optimizer.zero_grad()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def _need_whole(self) -> None:
        if self._lost:
            raise RuntimeError(f"the weights in memory are of no version ({self._lost}): load a checkpoint first")


def _float32(values: torch.Tensor) -> bytes:
    return values.float().cpu().numpy().tobytes()


def _int32(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int32).long()
