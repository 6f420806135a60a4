"""Logarithm and exponential of our own, made of additions, products and one division.

Called by `core.random` and `core.truncation`; `native/elementary.hpp` has the same steps. The libraries' functions
differ in their last bits between processors and versions. These consist of IEEE operations in a fixed order, none
of them fused, so noise and cuts are the same bits on every machine, native or not. Errors stay below 1 ulp (log)
and 2 ulp (exp). Coefficients: interpolation at Chebyshev nodes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float64]
Row: TypeAlias = npt.NDArray[np.floating[Any]]

_SQRT_HALF_BITS = np.int64(0x3FE6A09E667F3BCD)
_LN2_HIGH = float.fromhex("0x1.62e42fefa0000p-1")  # few bits, so that small multiples of it are exact
_LN2_LOW = float.fromhex("0x1.cf79abc9e3b3ap-40")
# log(1 + f) = f - s * (f - z * P(z)) with s = f / (2 + f), z = s * s.
_LOG = tuple(
    float.fromhex(text)
    for text in (
        "0x1.5555555555558p-1",
        "0x1.99999999952d7p-2",
        "0x1.2492492df281ap-2",
        "0x1.c71c62e3f11e6p-3",
        "0x1.7462b51cb66b1p-3",
        "0x1.39fe51a7c18f9p-3",
        "0x1.2b5900de53b32p-3",
    )
)
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_LOWEST = -80.0  # far below anything that weighs
# exp(r) = 1 + (r + r * r * Q(r)) for |r| up to half of log 2. Per type: rounder, log 2 in two parts, Q.
_EXP_32 = (
    12582912.0,
    float.fromhex("0x1.62e4p-1"),
    float.fromhex("0x1.7f7d1cp-20"),
    tuple(
        float.fromhex(text)
        for text in ("0x1.0p-1", "0x1.5554dcp-3", "0x1.555518p-5", "0x1.120be2p-7", "0x1.6d117cp-10")
    ),
)
_EXP_64 = (
    6755399441055744.0,
    _LN2_HIGH,
    _LN2_LOW,
    tuple(
        float.fromhex(text)
        for text in (
            "0x1.0000000000001p-1",
            "0x1.5555555555556p-3",
            "0x1.5555555553d37p-5",
            "0x1.11111111109a6p-7",
            "0x1.6c16c1789d1d7p-10",
            "0x1.a01a01a7cebcdp-13",
            "0x1.a019b8ca26fcfp-16",
            "0x1.71de0d85293b8p-19",
            "0x1.2891d4ffbb0f9p-22",
            "0x1.af390ba7e6f47p-26",
        )
    ),
)
_FLOAT_BITS, _DOUBLE_BITS = 37, 48  # binary places of a weight at most
_BLOCK = 4096  # intermediate results stay in the cache


def log(values: Vector) -> Vector:
    """Natural logarithm of normal positive numbers."""
    bits = values.view(np.int64)
    exponents = (bits - _SQRT_HALF_BITS) >> 52
    powers = exponents.astype(np.float64)
    fraction = (bits - (exponents << 52)).view(np.float64)
    fraction -= 1.0
    ratio = fraction / (fraction + 2.0)
    square = ratio * ratio
    series = np.full_like(square, _LOG[-1])
    for coefficient in _LOG[-2::-1]:
        series *= square
        series += coefficient
    series *= square
    correction = ratio * (fraction - series) - powers * _LN2_LOW
    return powers * _LN2_HIGH + (fraction - correction)


def gumbel(raw: npt.NDArray[np.uint64]) -> Vector:
    """Standard Gumbel noise from random 64-bit words: -log(-log u), u = ((word >> 12) + 0.5) / 2**52."""
    noise = np.empty(len(raw))
    for start in range(0, len(raw), _BLOCK):
        noise[start : start + _BLOCK] = -log(-log(uniforms(raw[start : start + _BLOCK])))
    return noise


def uniforms(raw: npt.NDArray[np.uint64]) -> Vector:
    """Numbers strictly inside (0, 1), so that their logarithms are finite: half a step off zero."""
    numbers = (raw >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 1.0 / (1 << 52)
    return numbers


def exp_weights(values: Row, largest: float, inverse_temperature: float, count: int) -> Vector:
    """exp((value - largest) * inverse_temperature) in fixed point; the values are at most `largest`.

    The exponential is taken in the precision of the values. Results are cut off (double precision: rounded) to so few
    binary places that a sum of `count` of them is exact: it depends neither on order nor on how many are added at a
    time.
    """
    unit = values.dtype.type
    rounder, ln2_high, ln2_low, series = _EXP_32 if unit is np.float32 else _EXP_64
    x = values - unit(largest)
    x *= unit(inverse_temperature)
    np.maximum(x, unit(_LOWEST), out=x)
    exponents = x * unit(_LOG2_E) + unit(rounder)
    exponents -= unit(rounder)
    x -= exponents * unit(ln2_high)
    x -= exponents * unit(ln2_low)
    powers = np.full_like(x, unit(series[-1]))
    for coefficient in series[-2::-1]:
        powers *= x
        powers += unit(coefficient)
    powers *= x * x
    powers += x
    powers += unit(1)
    if unit is np.float32:
        powers.view(np.int32)[...] += exponents.astype(np.int32) << np.int32(23)
    else:
        powers.view(np.int64)[...] += exponents.astype(np.int64) << np.int64(52)
    weights: Vector = powers.astype(np.float64)
    if unit is np.float32:
        scale = float(1 << weight_bits(_FLOAT_BITS, count))
        weights *= scale
        np.floor(weights, out=weights)
        weights *= 1 / scale
    else:
        step = 1.5 * 2.0 ** (52 - weight_bits(_DOUBLE_BITS, count))
        weights += step
        weights -= step
    return weights


def weight_bits(most: int, count: int) -> int:
    """Binary places with which `count` weights of at most 1 add up exactly."""
    return min(most, 53 - (count - 1).bit_length())
