"""Rotary position embeddings as a table of unit complex numbers that grows with the positions seen.

Called by the backends once per step; all layers of a kind share the rows it returns. Invariant: angles
are formed in float32 exactly as published implementations form them, since models were trained with
those roundings; a float64 model rotates by the same angles.

Shape letters: N rows, P positions, K head size.
"""

from __future__ import annotations

import math

import torch

from draftsmith.models.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position for each of the K/2 pairs, float32 [K/2].

    Sources: RoFormer (2104.09864); linear interpolation (2306.15595); the Llama 3.1 wavelength rule;
    YaRN "NTK by parts" (2309.00071, section 3.2).
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**steps)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, head_dim, steps)
    assert rope.kind == "default", rope.kind
    return frequencies


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    context = rope.original_context
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    stretched = frequencies / rope.factor
    blended = (1 - blend) * stretched + blend * frequencies
    result = torch.where(wavelengths > context / rope.low_freq_factor, stretched, blended)
    return torch.where(wavelengths < context / rope.high_freq_factor, frequencies, result)


def _yarn(rope: RopeSpec, head_dim: int, steps: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often within the original context are kept, those that turn rarely are stretched."""

    def pair_of(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = rope.theta**steps
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def cosines_and_sines(frequencies: torch.Tensor, scale: float, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled cosines and sines, float32 [length, K/2], of positions 0..length-1."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


class RotaryTable:
    """cos + i sin for each position and pair; grows by doubling."""

    def __init__(self, rope: RopeSpec, head_dim: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype`: float32 or float64, the precision rotations are done in."""
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._scale = rope.attention_factor
        self._dtype = dtype
        self._device = device
        self._table_PK = self._build(512)

    def rows(self, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Complex [N, 1, K/2] for int64 positions [N], all below `longest`."""
        if longest > len(self._table_PK):
            self._table_PK = self._build(max(longest, 2 * len(self._table_PK)))
        return self._table_PK.index_select(0, positions).unsqueeze(1)

    def _build(self, length: int) -> torch.Tensor:
        cosines, sines = cosines_and_sines(self._frequencies, self._scale, length)
        return torch.complex(cosines.to(self._dtype), sines.to(self._dtype)).to(self._device)
