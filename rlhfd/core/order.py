"""Which prompt an ordinal stands for, and which noise a request samples with: pure functions of seeds.

Resume is a query: nothing here keeps a cursor, so the answers must never change between releases for the same
arguments. The tests pin some of them.
"""

from hashlib import blake2b

ROUNDS = 6  # a Feistel network is a pseudo-random permutation from 4 on; two more for halves of one or two bits


def row_of(seed: int, ordinal: int, rows: int) -> int:
    """Row in [0, rows) of the prompt that group `ordinal` samples; epoch `ordinal // rows` visits every row once.

    Each epoch is another permutation. O(1) memory and time: a Feistel network over the least square of a power of two
    that holds `rows`, walked along its cycle until it lands inside (4 rounds of the walk at most on average).
    Raises ValueError for a negative ordinal or no rows.
    """
    if rows < 1 or ordinal < 0:
        raise ValueError(f"no row for ordinal {ordinal} of {rows} rows")
    epoch, place = divmod(ordinal, rows)
    half_bits = ((rows - 1).bit_length() + 1) // 2
    key = blake2b(f"rlhfd order {seed} {epoch}".encode()).digest()
    place = _permute(place, half_bits, key)
    while place >= rows:
        place = _permute(place, half_bits, key)
    return place


def _permute(value: int, half_bits: int, key: bytes) -> int:
    """One pass of the network: a bijection of [0, 4**half_bits)."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(ROUNDS):
        digest = blake2b(f"{turn} {right}".encode(), key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half_bits | right


def request_seed(job_seed: int, ordinal: int, k: int, tokens_so_far: int) -> int:
    """Sampling seed in [0, 2**31) of one request to the generator.

    A continued rollout is resent with the tokens it has; with the seed unchanged the engine would replay the noise of
    the first request, hence `tokens_so_far`.
    """
    digest = blake2b(f"rlhfd request {job_seed} {ordinal} {k} {tokens_so_far}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF
