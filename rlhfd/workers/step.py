"""One learner step: the micro-batches of a minibatch are summed into one optimiser step, `num_iterations` times over.

    groups -> rollouts -> [recompute: one forward without gradient, fixed over the minibatches]
    for each iteration and minibatch (one optimiser step):
        for each micro-batch:  forward -> policy log-probs -> proximal ones -> loss / denominators -> backward
        norm -> clip -> AdamW
    -> fingerprint, metrics, traces

The version that the step starts from is one number for all its minibatches. Where the proximal policy is interpolated
(`loglinear`) it follows the policy from minibatch to minibatch. NaN or Inf anywhere raises NonFiniteError with the
rollouts named, and leaves parameters and optimiser as they were.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import TypeAlias

import torch
from torch import Tensor

from rlhfd.core import wire
from rlhfd.workers.batch import MicroBatch, collate, micro_batches, read_rollouts
from rlhfd.workers.logprobs import TokenScores
from rlhfd.workers.losses import (
    LOSS_TYPES,
    LossTokens,
    PolicyLoss,
    policy_loss,
    proximal_logprobs,
    staleness_alpha,
)
from rlhfd.workers.model import Policy
from rlhfd.workers.optimizer import Optimizer, checksum
from rlhfd.workers.step_checks import (
    check_rollouts,
    check_settings,
    clipping_of,
    denominators_of,
    non_finite,
    refuse_non_finite,
)
from rlhfd.workers.token_log import TokenLog, TokenRecord

Heartbeat: TypeAlias = Callable[[str, int, int], None]  # phase, done, total
SURROGATE_COLUMNS = ("ratio", "raw_weight", "weight", "low", "high", "capped")


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """The proximal log-probs of a micro-batch [B, T]; alpha [B, T] is the behaviour policy's share in them.

    error: |loglinear - recomputed| where both are known.
    """

    prox: Tensor
    alpha: Tensor
    error: Tensor | None = None


@dataclass(kw_only=True)
class Stopwatch:
    """Seconds spent inside `running`, with the device's queue drained at both ends."""

    device: torch.device
    seconds: float = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Count what happens inside."""
        start = self._now()
        yield
        self.seconds += self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(kw_only=True)
class OptimizerStepLog:
    """What the fingerprint keeps of each optimiser step."""

    losses: list[float] = field(default_factory=list[float])
    grad_norms: list[float] = field(default_factory=list[float])


class LearnerStep:
    """Made for one `wire.Learn` and its groups; `run` once."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        learn: wire.Learn,
        groups: Sequence[wire.GroupFrame],
        heartbeat: Heartbeat,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._learn = learn
        self._settings = learn.settings
        self._rollouts = read_rollouts(groups)
        self._heartbeat = heartbeat
        self._log = TokenLog()
        self._untrained_log = TokenLog()
        self._optimizer_steps = OptimizerStepLog()
        self._prox_time = Stopwatch(device=policy.device)
        self._recomputed: dict[int, Tensor] = {}
        check_settings(learn.settings)
        check_rollouts(self._rollouts, learn.settings.minibatches, policy.head.shape[0])

    def run(self) -> wire.Learned:
        """Train, or raise and change nothing."""
        whole = Stopwatch(device=self._policy.device)
        settings = self._settings
        with whole.running(), self._optimizer.restored_on_error(steps=len(settings.learning_rates)):
            self._look_at_untrained()
            self._recompute()
            for number, (iteration, minibatch) in enumerate(
                product(range(settings.num_iterations), range(settings.minibatches))
            ):
                self._optimizer_step(minibatch, settings.learning_rates[number], first_pass=iteration == 0)
            fingerprint = self._fingerprint()
        return wire.Learned(
            step=self._learn.step,
            fingerprint=fingerprint,
            metrics=self._metrics(),
            times={"prox_logp": self._prox_time.seconds, "learn": whole.seconds - self._prox_time.seconds},
            traces=self._log.traces(self._learn.trace) + self._untrained_log.traces(self._learn.trace),
        )

    def _fingerprint(self) -> wire.Fingerprint:
        done = self._optimizer_steps
        return wire.Fingerprint(
            losses=done.losses,
            grad_norms=done.grad_norms,
            skipped=[False] * len(done.losses),
            policy=checksum(self._policy.trainable()),
            optimizer=checksum(self._optimizer.state()),
        )

    def _metrics(self) -> dict[str, float]:
        done = self._optimizer_steps
        return {"loss": fmean(done.losses), "grad_norm": fmean(done.grad_norms)} | self._log.metrics()

    # --- one optimiser step -----------------------------------------------------------------------------------------

    def _optimizer_step(self, minibatch: int, learning_rate: float, *, first_pass: bool) -> None:
        trained = list(micro_batches(self._rollouts, minibatch, self._policy.device))
        loss = 0.0
        for number, batch in enumerate(trained):
            loss += self._accumulate(batch, minibatch, first_pass=first_pass)
            self._heartbeat(f"learn minibatch {minibatch}", number + 1, len(trained))
        self._optimizer.fill_grads()
        norm = self._optimizer.grad_norm()
        if not bool(torch.isfinite(norm)):
            raise non_finite("the gradient's norm", [r for batch in trained for r in batch.rollouts])
        self._optimizer_steps.losses.append(loss)
        self._optimizer_steps.grad_norms.append(float(norm))
        self._optimizer.step(learning_rate=learning_rate, norm=norm, max_norm=self._settings.max_grad_norm)
        self._optimizer.zero_grad()

    def _accumulate(self, batch: MicroBatch, minibatch: int, *, first_pass: bool) -> float:
        """Forward and backward of one micro-batch; its part of the optimiser step's loss."""
        settings = self._settings
        scores = self._policy.scores(batch.inputs, settings.temperature)
        policy = batch.padded(scores.logps)
        refuse_non_finite("the policy's log-prob", policy.detach(), batch)
        with self._prox_time.running():
            anchor = self._anchor(batch, policy.detach())
        result = self._loss(batch, policy, anchor, minibatch)
        refuse_non_finite("the loss", result.tokens.objective.detach(), batch)
        result.loss.backward()  # pyright: ignore[reportUnknownMemberType]
        columns = self._columns(batch, scores, anchor, result)
        self._log.add(_record(batch, columns, first_pass=first_pass, first_minibatch=first_pass and minibatch == 0))
        return float(result.loss.detach())

    def _loss(self, batch: MicroBatch, policy: Tensor, anchor: Anchor, minibatch: int) -> PolicyLoss:
        tokens = LossTokens(
            policy=policy, behave=batch.behave, prox=anchor.prox, advantages=batch.advantages, mask=batch.mask
        )
        settings = self._settings
        return policy_loss(
            tokens, LOSS_TYPES[settings.loss_type], clipping_of(settings), denominators_of(settings, minibatch)
        )

    def _columns(self, batch: MicroBatch, scores: TokenScores, anchor: Anchor, result: PolicyLoss) -> dict[str, Tensor]:
        """Of a `TokenRecord`."""
        padded = {
            "staleness": (self._learn.version_in - batch.versions).clamp(min=0),
            "behave": batch.behave,
            "prox": anchor.prox,
            "alpha": anchor.alpha,
            **{name: getattr(result.tokens, name) for name in SURROGATE_COLUMNS},
        }
        if anchor.error is not None:
            padded["prox_error"] = anchor.error
        flat = {name: values[batch.mask] for name, values in padded.items()}
        flat |= {"policy": scores.logps.detach(), "entropy": scores.entropy}
        return {name: values.cpu() for name, values in flat.items()}

    def _anchor(self, batch: MicroBatch, policy: Tensor) -> Anchor:
        """The proximal policy by the job's method. `none` is the behaviour policy itself: the weight is then 1."""
        method = self._settings.prox_logp_method
        if method == "none":
            return Anchor(prox=batch.behave, alpha=torch.ones_like(batch.behave))
        if method == "loglinear":
            return self._interpolated(batch, policy)
        prox = batch.padded(torch.cat([self._recomputed[r.id] for r in batch.rollouts]))
        error = None
        if method == "metrics":
            error = (self._interpolated(batch, policy).prox - prox).abs()
        return Anchor(prox=prox, alpha=torch.zeros_like(prox), error=error)

    def _interpolated(self, batch: MicroBatch, policy: Tensor) -> Anchor:
        version, zero = self._learn.version_in, self._settings.zero_staleness
        return Anchor(
            prox=proximal_logprobs(batch.behave, policy, batch.versions, version, zero_staleness=zero),
            alpha=staleness_alpha(batch.versions, version, zero_staleness=zero),
        )

    # --- forwards without gradient, before the first update -----------------------------------------------------------

    @torch.no_grad()
    def _recompute(self) -> None:
        """The policy's log-probs at the start of the step, for the methods that anchor there."""
        if self._settings.prox_logp_method not in {"recompute", "metrics"}:
            return
        for minibatch in range(self._settings.minibatches):
            batches = list(micro_batches(self._rollouts, minibatch, self._policy.device))
            for number, batch in enumerate(batches):
                with self._prox_time.running():
                    logps = self._policy.scores(batch.inputs, self._settings.temperature).logps
                self._keep_recomputed(batch, logps)
                self._heartbeat(f"recompute minibatch {minibatch}", number + 1, len(batches))

    def _keep_recomputed(self, batch: MicroBatch, logps: Tensor) -> None:
        lengths = [len(rollout.tokens) for rollout in batch.rollouts]
        self._recomputed |= zip((r.id for r in batch.rollouts), torch.split(logps, lengths), strict=True)

    @torch.no_grad()
    def _look_at_untrained(self) -> None:
        """Rollouts to trace that nothing reaches: a forward for the eye alone."""
        wanted = set(self._learn.trace)
        for rollout in self._rollouts:
            if rollout.id in wanted and not rollout.trained and len(rollout.tokens):
                batch = collate([rollout], self._policy.device)
                scores = self._policy.scores(batch.inputs, self._settings.temperature)
                self._keep_recomputed(batch, scores.logps)
                policy = batch.padded(scores.logps)
                anchor = self._anchor(batch, policy)
                columns = self._columns(batch, scores, anchor, self._loss(batch, policy, anchor, rollout.minibatch))
                self._untrained_log.add(_record(batch, columns, first_pass=True, first_minibatch=False))


def _record(batch: MicroBatch, columns: dict[str, Tensor], *, first_pass: bool, first_minibatch: bool) -> TokenRecord:
    return TokenRecord(
        rollout_ids=[rollout.id for rollout in batch.rollouts],
        lengths=[len(rollout.tokens) for rollout in batch.rollouts],
        columns=columns,
        first_pass=first_pass,
        first_minibatch=first_minibatch,
    )
