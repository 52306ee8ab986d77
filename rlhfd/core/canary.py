"""Does the generator serve what the learner trained? Pure arithmetic over canary log-probs (invariant 6).

A canary is a few fixed token sequences; its log-probs are one float32 array per sequence, as bytes. Three questions:
did the engine follow a visible change (`follows`), did a real update change anything (`bytes` differ), and is it near
the reference (`near`)? A tolerance alone can't see a stale head in bf16: hence the probe.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

FLOOR = 5e-5  # mean |engine - reference| that float32 arithmetic reaches on a healthy engine
SLACK = 3.0  # times the start model's noise
RESPONSE = 0.5  # least share of the learner's movement that an engine which follows shows


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """|a - b| over all tokens of a canary, nats."""

    mean: float
    max: float


def distance(a: Sequence[bytes], b: Sequence[bytes]) -> Distance:
    """Compare two canaries, float32 [len - 1] per sequence. Raises ValueError on other shapes, and on none at all."""
    gaps: list[float] = []
    for left, right in zip(a, b, strict=True):
        gaps += [abs(x - y) for x, y in zip(_floats(left), _floats(right), strict=True)]
    if not gaps:
        raise ValueError("the canary is empty")
    return Distance(mean=sum(gaps) / len(gaps), max=max(gaps))


def tolerance(noise: float) -> float:
    """Mean distance from the reference that is still healthy; `noise` is the start model's own."""
    return max(SLACK * noise, FLOOR)


def near(engine: Sequence[bytes], reference: Sequence[bytes], noise: float) -> bool:
    """The gross check: NaN is never near."""
    return distance(engine, reference).mean <= tolerance(noise)


def follows(
    engine: tuple[Sequence[bytes], Sequence[bytes]], learner: tuple[Sequence[bytes], Sequence[bytes]], noise: float
) -> bool:
    """(before, after) of a probe publication: the engine moved as the learner did, and arrived where the learner is."""
    moved, expected = distance(*engine).mean, distance(*learner).mean
    return near(engine[1], learner[1], noise) and moved >= RESPONSE * expected > 0


def _floats(data: bytes) -> "array[float]":
    values = array("f")
    values.frombytes(data)
    return values
