"""Rows of a recurrent drafter in C++, over 8-bit or 4-bit weights: a whole chain is drafted in one call.

Called by `drafters.recurrent` through `RowRunner`; the work happens in `native/row_drafter.hpp`, on the threads and
the embedding of the target's own native backend. Invariant: what a row gives depends on itself and the rows it sees
alone, bit for bit, so a chain is what `begin` and `extend` would have drafted token by token.

Shape letters: S sequences, F features of a row, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

import numpy as np
import torch
from torch import nn

from draftsmith.drafters.draft_layer import LayerShape
from draftsmith.drafters.packed_linear import packed
from draftsmith.drafters.row_parts import RowParts
from draftsmith.drafters.rows import Chain, ChainDraw, Level, RowRunner, TrueRows
from draftsmith.errors import CapacityError, DraftsmithError, ModelFileError, OptionError
from draftsmith.models.backend import Backend
from draftsmith.models.fork_lock import ForkLock
from draftsmith.models.native import CACHE_DTYPES, NativeBackend
from draftsmith.models.rope import cosines_and_sines, inverse_frequencies

if TYPE_CHECKING:
    from draftsmith import _native

_TILE = 16
_FIRST_POSITIONS, _MOST_POSITIONS = 512, 2**24
T = TypeVar("T")
_NO_FEATURES = np.empty((0, 0), np.float32)


@dataclass(frozen=True, kw_only=True)
class NativeRowsOptions:
    """`bits` (8 or 4): what the drafter's weights are quantised to. `cache`: what keys and values are kept in."""

    bits: int = 8
    cache: str = "float16"

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise OptionError(f"a drafter's weights are quantised to 8 or 4 bits, not {self.bits}")
        if self.cache not in CACHE_DTYPES:
            raise OptionError(f"keys and values are kept in {', '.join(CACHE_DTYPES)}, not {self.cache!r}")


@final
class NativeRows(RowRunner):
    """Runs a drafter described by its parts beside a native target."""

    def __init__(self, parts: RowParts, backend: NativeBackend, options: NativeRowsOptions | None = None) -> None:
        """Pack the weights. Raises `ModelFileError` for one that is not finite, `CapacityError` without memory."""
        from draftsmith import _native

        assert self.can_run(parts.shape, backend), "the kernels cannot serve this drafter"
        options = options or NativeRowsOptions()
        self._parts = parts
        self._num_ids = len(parts.draft_ids)
        self._calls = ForkLock()
        try:
            self._drafter = _native.RowDrafter(
                _shape(parts, backend),
                _weights(parts, backend, options.bits),
                owns_head=parts.head_UD is not None or self._num_ids != backend.spec.vocab_size,
                cache_type=options.cache,
                threads=backend.threads,
                pin=backend.options.pin,
                kernels=backend.kernels,
            )
        except MemoryError as error:
            raise CapacityError("the weights of this drafter do not fit into memory") from error
        # Slots grow by doubling, so a token may hold twice its row.
        self.bytes_per_token = 2 * self._drafter.bytes_per_row
        self._grow_rotation(_FIRST_POSITIONS)

    @staticmethod
    def can_run(shape: LayerShape, backend: Backend) -> bool:
        """Whether the kernels serve a layer of this shape beside this target."""
        return isinstance(backend, NativeBackend) and shape.head_dim % _TILE == 0

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, those that are the target's as well left out."""
        return self._drafter.weight_bytes

    def num_rows(self, sequence_id: int) -> int:
        return self._call((), 0, lambda: self._drafter.num_rows(sequence_id))

    def append(self, groups: Sequence[TrueRows]) -> None:
        self._call(groups, 0, lambda: self._drafter.append(*_flat(groups)))

    def begin(self, groups: Sequence[TrueRows]) -> torch.Tensor:
        logits_SU = np.empty((len(groups), self._num_ids), np.float32)
        self._call(groups, 1, lambda: self._drafter.begin(*_flat(groups), logits_SU))
        return torch.from_numpy(logits_SU)

    def chain(
        self,
        groups: Sequence[TrueRows],
        depths: Sequence[int],
        least: float = 0.0,
        draws: Sequence[ChainDraw | None] = (),
    ) -> list[Chain]:
        most = max(depths, default=0)
        drawn = [None if draw is None else _draw_values(draw) for draw in draws]
        found = self._call(groups, most, lambda: self._drafter.chain(*_flat(groups), list(depths), least, drawn))
        return [Chain(tokens, probs) for tokens, probs in found]

    def extend(self, levels: Sequence[Level]) -> list[torch.Tensor]:
        sizes = [len(level.tokens) for level in levels]
        logits = np.empty((sum(sizes), self._num_ids), np.float32)
        ids = [level.sequence_id for level in levels]
        tokens, parents = [list(level.tokens) for level in levels], [list(level.parents) for level in levels]

        def call() -> None:
            for sequence_id in ids:
                # A path is never longer than there are speculative rows.
                self._reach(self._drafter.num_rows(sequence_id) + self._drafter.num_drafted(sequence_id) + 1)
            self._drafter.extend(ids, tokens, parents, logits)

        self._call((), 0, call)
        return list(torch.from_numpy(logits).split(sizes))

    def truncate(self, sequence_id: int, num_rows: int) -> None:
        self._call((), 0, lambda: self._drafter.truncate(sequence_id, num_rows))

    def fork(self, source: int, copy: int, num_rows: int) -> None:
        self._call((), 0, lambda: self._drafter.fork(source, copy, num_rows))

    def forget(self, sequence_id: int) -> None:
        self._call((), 0, lambda: self._drafter.forget(sequence_id))

    def _call(self, groups: Sequence[TrueRows], depth: int, call: Callable[[], T]) -> T:
        """One call at a time, with rotations for `depth` more rows; what cannot be is a `DraftsmithError`."""
        try:
            with self._calls.lock:
                for group in groups:
                    self._reach(self._drafter.num_rows(group.sequence_id) + len(group.tokens) + depth)
                return call()
        except MemoryError as error:
            raise CapacityError("the rows of this drafter do not fit into memory") from error
        except (ValueError, OverflowError, TypeError) as error:
            raise DraftsmithError(f"a drafter was asked for something impossible: {error}") from error

    def _reach(self, num_positions: int) -> None:
        if num_positions > _MOST_POSITIONS:
            raise ValueError(f"{num_positions} positions, and {_MOST_POSITIONS} are the most")
        if num_positions > self._drafter.num_positions:
            self._grow_rotation(max(num_positions, 2 * self._drafter.num_positions))

    def _grow_rotation(self, num_positions: int) -> None:
        shape = self._parts.shape
        frequencies = inverse_frequencies(shape.rotary, shape.head_dim)
        cosines, sines = cosines_and_sines(frequencies, shape.rotary.attention_factor, num_positions)
        self._drafter.set_rotation(cosines.numpy(), sines.numpy())


def _flat(groups: Sequence[TrueRows]) -> tuple[list[int], list[list[int]], list[np.ndarray]]:
    features = [
        group.features.to(torch.float32).contiguous().numpy() if len(group.tokens) else _NO_FEATURES for group in groups
    ]
    return [group.sequence_id for group in groups], [list(group.tokens) for group in groups], features


def _draw_values(draw: ChainDraw) -> tuple[int, int, int, float, int, float, float]:
    seed, stream, position, _ = draw.random.target_noise(draw.position).words
    return seed, stream, position, *draw.sampler.truncation


def _shape(parts: RowParts, backend: NativeBackend) -> dict[str, Any]:
    shape = parts.shape
    return {
        "feature_width": parts.feature_width,
        "embedding_width": backend.spec.width,
        "width": shape.width,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "mlp_width": shape.mlp_width,
        "num_ids": len(parts.draft_ids),
        "norm_eps": shape.norm_eps,
        "attention_scale": shape.head_dim**-0.5,
        "attention_cap": 0.0,
        "logit_cap": parts.logit_cap or 0.0,
        "embedding_scale": backend.spec.embedding_scale,
        "is_feature_first": parts.is_feature_first,
        "norms_residual": parts.norms_residual,
        "feeds_normed": parts.feeds_normed,
    }


def _weights(parts: RowParts, backend: NativeBackend, bits: int) -> dict[str, Any]:
    layer = parts.layer
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "reduce": _linear([parts.reduce], bits) if parts.reduce is not None else None,
        "fuse": _linear([parts.fuse], bits) if parts.fuse is not None else None,
        "qkv": _linear([attention.q_proj, attention.k_proj, attention.v_proj], bits),
        "output": _linear([attention.o_proj], bits),
        "gate_up": _linear([mlp.gate_proj, mlp.up_proj], bits),
        "down": _linear([mlp.down_proj], bits),
        "head": ([_head(parts, backend, bits)], None),
        "tap_norms": _floats(parts.tap_norms),
        "embedding_norm": _floats(parts.embedding_norm),
        "feature_norm": _floats(parts.feature_norm),
        "attention_norm": _floats(parts.attention_norm),
        "mlp_norm": _floats(layer.post_attention_layernorm.weight),
        "query_norm": _floats(attention.q_norm.weight) if attention.q_norm is not None else None,
        "key_norm": _floats(attention.k_norm.weight) if attention.k_norm is not None else None,
        "final_norm": _floats(parts.final_norm),
        "embedding": backend.embedding,
        "ids": parts.draft_ids.to(torch.int32).numpy(),
    }


def _head(parts: RowParts, backend: NativeBackend, bits: int) -> _native.Packed:
    """The head's rows; the target's own stay as they were packed."""
    if parts.head_UD is not None:
        return packed(parts.head_UD, bits)
    if len(parts.draft_ids) == backend.spec.vocab_size:
        return backend.head
    return backend.head.select(parts.draft_ids.to(torch.int32).numpy())


def _linear(layers: Sequence[nn.Linear], bits: int) -> tuple[list[_native.Packed], np.ndarray | None]:
    biases: list[torch.Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return [packed(layer.weight, bits) for layer in layers], _floats(torch.cat(biases)) if biases else None


def _floats(values: torch.Tensor | None) -> np.ndarray | None:
    if values is None:
        return None
    if not torch.isfinite(values).all():
        raise ModelFileError("the drafter's weights: one of a norm or a bias is not finite")
    return values.detach().to(torch.float32).contiguous().numpy()
