"""What each token of a step went through: the source of the learner's metrics and of the token traces."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rlhfd.core import wire
from rlhfd.workers.losses import approximate_kl, extremes

TRACED = ("alpha", "policy", "prox", "weight", "ratio")


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """One forward of one micro-batch: its rollouts' ids and lengths, and columns of CPU values [n], rollout by rollout.

    Columns: staleness, behave, policy, prox, alpha, ratio, raw_weight, weight, low, high, capped, entropy, and
    prox_error where the proximal log-prob is known both ways. first_pass: in the first iteration; first_minibatch: in
    its first minibatch, before any update.
    """

    rollout_ids: Sequence[int]
    lengths: Sequence[int]
    columns: Mapping[str, Tensor]
    first_pass: bool
    first_minibatch: bool


class TokenLog:
    """Collects the records of a step, in the order of the forwards."""

    def __init__(self) -> None:
        self._records: list[TokenRecord] = []

    def add(self, record: TokenRecord) -> None:
        """One more forward."""
        self._records.append(record)

    def traces(self, rollout_ids: Iterable[int]) -> list[wire.TokenTrace]:
        """Of these rollouts, as far as they were forwarded: what the first pass used."""
        wanted = set(rollout_ids)
        return [trace for record in self._records if record.first_pass for trace in _traces(record, wanted)]

    def metrics(self) -> dict[str, float]:
        """Names of core/metrics.py, learner side. What has no token to be measured on is absent, never 0.

        Ratios, weights and clipping: every pass. Distance to the behaviour policy, entropy, alpha, staleness: the
        first, in which each trained token comes once. `clip_fraction_d0`: over the tokens of staleness 0 in the first
        minibatch, before any update: pure numerical mismatch.
        """
        every = _Tokens(self._records)
        first = _Tokens([r for r in self._records if r.first_pass])
        untouched = _Tokens([r for r in self._records if r.first_minibatch])
        return every.clipping() | first.distance() | untouched.mismatch()


class _Tokens:
    """The tokens of some records in one row."""

    def __init__(self, records: Sequence[TokenRecord]) -> None:
        self._records = records
        self._size = sum(sum(r.lengths) for r in records)

    def column(self, name: str) -> Tensor:
        return torch.cat([r.columns[name] for r in self._records])

    def clipping(self) -> dict[str, float]:
        if not self._size:
            return {}
        low, high = self.column("low"), self.column("high")
        return {
            "clip_fraction": _mean(low | high),
            "clip_fraction_low": _mean(low),
            "clip_fraction_high": _mean(high),
            "weight_capped_fraction": _mean(self.column("capped")),
            **extremes("ratio", self.column("ratio")),
            **extremes("weight", self.column("raw_weight")),
        }

    def distance(self) -> dict[str, float]:
        if not self._size:
            return {}
        difference = self.column("policy").double() - self.column("behave").double()
        fresh = difference[self.column("staleness") == 0]
        found = {
            "logp_diff_mean": _mean(difference.abs()),
            "kl": approximate_kl(difference),
            "ess": effective_share(difference),
            "entropy": _mean(self.column("entropy")),
            "alpha_mean": _mean(self.column("alpha")),
            **extremes("staleness", self.column("staleness")),
        }
        if len(fresh):
            found["logp_diff_d0"] = _mean(fresh.abs())
        if "prox_error" in self._records[0].columns:
            found["prox_error"] = _mean(self.column("prox_error"))
        return found

    def mismatch(self) -> dict[str, float]:
        fresh = self.column("staleness") == 0 if self._size else torch.zeros(0)
        if not bool(fresh.any()):
            return {}
        return {"clip_fraction_d0": _mean((self.column("low") | self.column("high"))[fresh])}


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def effective_share(difference: Tensor) -> float:
    """Effective sample size of the weights exp(policy - behave) over their number, in (0, 1]; difference [n]."""
    log_weights = difference.double()
    log_share = 2 * torch.logsumexp(log_weights, 0) - torch.logsumexp(2 * log_weights, 0)
    return float(torch.exp(log_share)) / len(difference)


def _traces(record: TokenRecord, wanted: set[int]) -> Iterator[wire.TokenTrace]:
    bounds = pairwise(accumulate(record.lengths, initial=0))
    for rollout_id, (start, end) in zip(record.rollout_ids, bounds, strict=True):
        if rollout_id in wanted:
            part = slice(start, end)
            yield wire.TokenTrace(
                rollout_id=rollout_id,
                staleness=record.columns["staleness"][part].int().numpy().tobytes(),
                **{name: record.columns[name][part].float().numpy().tobytes() for name in TRACED},
            )
