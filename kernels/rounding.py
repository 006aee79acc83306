"""Stochastic rounding to bfloat16, and the random bits that decide it: the same on host and card.

A float32 between two bfloat16 neighbours goes up with the probability of its distance to the lower
one, in steps of 2^-16, so that the expected result is the value itself. Rounding to nearest instead
loses every update below half a unit in the last place: a weight that moves by less than |w| * 2^-9
never moves.

The bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011), a function of a counter and a key with no state between calls. Eight consecutive elements of
a tensor share a call and take 16 bits each:

    key = (seed, step)    counter = (group, group >> 32, tensor, role)    group = element // 8

so the bits of an element depend on no launch shape, and on no sharding when ``first`` is given. The
same functions for kernels are in cuda/rounding.cuh. Seven rounds pass the same tests of randomness;
the authors recommend ten, for a margin, and three calls of ten are a fifth of AdamW's instructions.
The casts to NVFP4, where ten were a fifth too, take seven.
"""

import numpy as np
from jaxtyping import BFloat16, Float32, UInt16, UInt32

from surogate.kernels.arrays import BF16, Array, require

GROUP = 8  # elements that share a Philox call
ROUNDS = 10  # of Philox
PARAM, FIRST_MOMENT, SECOND_MOMENT = 0, 1, 2  # roles: the stores of one step that round

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_EXPONENT = np.uint32(0x7F800000)
_HIGH_HALF = np.uint32(0xFFFF0000)


def philox(
    counter: UInt32[Array, "4 n"], key: tuple[int, int], *, rounds: int = ROUNDS
) -> UInt32[Array, "4 n"]:
    """Philox4x32 of each column of ``counter`` under one key of two 32-bit words."""
    a, b, c, d = (word.astype(np.uint64) for word in counter)
    shift = np.uint64(32)
    for turn in range(rounds):
        first, second = ((k + turn * w) & 0xFFFFFFFF for k, w in zip(key, _WEYL, strict=True))
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = (high >> shift) ^ b ^ np.uint64(first), high & _LOW
        c, d = (low >> shift) ^ d ^ np.uint64(second), low & _LOW
    return np.stack([a, b, c, d]).astype(np.uint32)


def random_bits(
    size: int,
    *,
    seed: int,
    step: int,
    tensor: int,
    role: int,
    first: int = 0,
    rounds: int = ROUNDS,
) -> UInt16[Array, " size"]:
    """Sixteen random bits for each of ``size`` consecutive elements of a tensor.

    ``first`` is the index in the whole tensor of the first element wanted, a multiple of 8;
    ``tensor`` and ``role`` tell apart the arrays that round in one step. All words are taken modulo
    2^32.
    """
    require(
        first >= 0 and first % GROUP == 0,
        f"random_bits: first must be a multiple of {GROUP} and at least 0, got {first}",
    )
    groups = np.arange(first // GROUP, (first + size + GROUP - 1) // GROUP, dtype=np.uint64)
    counter = np.empty((4, len(groups)), np.uint32)
    counter[0], counter[1] = groups & _LOW, groups >> np.uint64(32)
    counter[2], counter[3] = tensor & 0xFFFFFFFF, role
    key = (seed & 0xFFFFFFFF, step & 0xFFFFFFFF)
    words = philox(counter, key, rounds=rounds).T.reshape(-1)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1)
    return halves.reshape(-1)[:size].astype(np.uint16)


def stochastic_round(
    x: Float32[Array, "*shape"], bits: UInt16[Array, "*shape"]
) -> BFloat16[Array, "*shape"]:
    """``x`` rounded up in magnitude with probability (low 16 bits of x) / 2^16, else down.

    A finite value stays finite: past the largest bfloat16 it becomes that. Infinities, NaN stay.
    """
    word = np.ascontiguousarray(x).view(np.uint32)
    moved = (word + bits.astype(np.uint32)) & _HIGH_HALF
    overflowed = (moved & _EXPONENT) == _EXPONENT
    moved = np.where(overflowed, word & _HIGH_HALF, moved)
    rounded = np.where((word & _EXPONENT) == _EXPONENT, word, moved)
    with np.errstate(invalid="ignore"):  # NaN is passed on, not reported
        return rounded.view(np.float32).reshape(x.shape).astype(BF16)
