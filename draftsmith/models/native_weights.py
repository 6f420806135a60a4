"""From a model's tensors to the packed weights of the native backend, several at a time.

Used by `models.native` while it loads. Invariants: GGUF blocks are packed as they are, without a second
quantisation, wherever their type has an exact place; whatever is missing, misshapen or not a number is a
`ModelFileError` that names the tensor.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from draftsmith.errors import DraftsmithError, ModelFileError, OptionError, UnsupportedError
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import Load, TensorReader, check_shape

if TYPE_CHECKING:
    from draftsmith import _native

Raw: TypeAlias = Callable[[str], tuple[str, np.ndarray, tuple[int, ...]]]
"""A tensor as stored: ggml type name, bytes [rows, bytes of a row], logical shape."""

_FLOAT_TYPES = ("F32", "F16", "BF16")
# A group of weights of this size has a scale of 5 bits, in the range where half precision loses bits.
_FAINT = 2.0**-12

logger = logging.getLogger(__name__)


class Packer:
    """Reads tensors and packs them, several at a time."""

    def __init__(self, spec: DecoderSpec, load: Load, raw: Raw | None, bits: int, threads: int) -> None:
        self._spec = spec
        self._load = load
        self._raw = raw
        self._bits = bits
        self._tensors = TensorReader(spec, load)
        self._requantised: set[str] = set()
        self._faint: set[str] = set()
        self._workers = ThreadPoolExecutor(min(threads, os.cpu_count() or 1))
        try:
            self._pending = {name: self._workers.submit(self._pack, name, shape) for name, shape in self._linears()}
        except RuntimeError as error:  # of the system, about threads
            self._workers.shutdown(cancel_futures=True)
            raise OptionError(f"threads is {threads}: {error}") from error

    def __enter__(self) -> Packer:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def tell(self) -> None:
        """Warn when stored weights had to be quantised again, and of matrices that did not come through it well."""
        if self._faint:
            logger.warning(
                "all weights of %s are too small for scales in half precision and were rounded coarsely; the reference "
                "backend keeps them",
                ", ".join(sorted(self._faint)),
            )
        if self._requantised:
            logger.warning(
                "weights stored as %s have no exact place in the native backend and were quantised to %d bits",
                ", ".join(sorted(self._requantised)),
                self._bits,
            )

    def layer(self, index: int) -> dict[str, Any]:
        """What `_native.Decoder` takes for a layer, its place apart."""
        spec = self._spec
        at = f"{self._tensors.prefix}layers.{index}."
        after_attention = f"{at}post_attention_layernorm.weight"
        attention, mlp = f"{at}self_attn.", f"{at}mlp."
        names = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
        return {
            "qkv": self._linear(names, spec.qkv_bias),
            "output": self._linear((f"{attention}o_proj",), spec.output_bias),
            "gate_up": self._linear((f"{mlp}gate_proj", f"{mlp}up_proj"), spec.mlp_bias),
            "down": self._linear((f"{mlp}down_proj",), spec.mlp_bias),
            "attention_norm": self._norm(f"{at}input_layernorm.weight", spec.width),
            "attention_out_norm": self._norm(after_attention, spec.width) if spec.sandwich_norms else None,
            "mlp_norm": self._norm(
                f"{at}pre_feedforward_layernorm.weight" if spec.sandwich_norms else after_attention, spec.width
            ),
            "mlp_out_norm": (
                self._norm(f"{at}post_feedforward_layernorm.weight", spec.width) if spec.sandwich_norms else None
            ),
            "query_norm": self._norm(f"{attention}q_norm.weight", spec.head_dim) if spec.qk_norm else None,
            "key_norm": self._norm(f"{attention}k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        }

    def ends(self) -> tuple[_native.Packed, _native.Packed, np.ndarray]:
        """Embedding, head and final norm."""
        embedding = self._packed(self._tensors.embedding_name)
        head = embedding if self._spec.tied_head else self._packed(self._tensors.head_name)
        return embedding, head, self._norm(f"{self._tensors.prefix}norm.weight", self._spec.width)

    def _linears(self) -> list[tuple[str, tuple[int, int]]]:
        """Names and shapes of all matrices."""
        spec = self._spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {
            "self_attn.q_proj": (queries, spec.width),
            "self_attn.k_proj": (keys, spec.width),
            "self_attn.v_proj": (keys, spec.width),
            "self_attn.o_proj": (spec.width, queries),
            "mlp.gate_proj": (spec.mlp_width, spec.width),
            "mlp.up_proj": (spec.mlp_width, spec.width),
            "mlp.down_proj": (spec.width, spec.mlp_width),
        }
        ends = dict.fromkeys([self._tensors.embedding_name, self._tensors.head_name], (spec.vocab_size, spec.width))
        return list(ends.items()) + [
            (f"{self._tensors.prefix}layers.{layer}.{name}.weight", shape)
            for layer in range(spec.num_layers)
            for name, shape in shapes.items()
        ]

    def _linear(self, names: Sequence[str], has_bias: bool) -> tuple[list[_native.Packed], np.ndarray | None]:
        parts = [self._packed(f"{name}.weight") for name in names]
        if not has_bias:
            return parts, None
        return parts, np.concatenate(
            [self._bias(f"{name}.bias", part.outputs) for name, part in zip(names, parts, strict=True)]
        )

    def _bias(self, name: str, size: int) -> np.ndarray:
        return self._finite(name, self._tensors.named(name, (size,)).to(torch.float32).numpy())

    def _packed(self, name: str) -> _native.Packed:
        return self._pending[name].result()

    def _pack(self, name: str, shape: tuple[int, int]) -> _native.Packed:
        from draftsmith import _native

        try:
            stored = self._stored(name)
            if stored is not None:
                type_name, rows, found = stored
                check_shape(name, found, shape)
                if type_name not in _FLOAT_TYPES:
                    packed = _native.pack_ggml(type_name, np.ascontiguousarray(rows), shape[1])
                    if packed is not None:
                        return packed
                if type_name != "F32":
                    self._requantised.add(type_name)
            values = self._tensors.named(name, shape).to(torch.float32).contiguous().numpy()
            if 0 < max(values.max(), -values.min()) < _FAINT:
                self._faint.add(name)
            return _native.pack_floats(values, self._bits)
        except ValueError as error:
            if isinstance(error, DraftsmithError):
                raise
            raise ModelFileError(f"tensor {name!r}: {error}") from error

    def _stored(self, name: str) -> tuple[str, np.ndarray, tuple[int, ...]] | None:
        """A tensor's blocks, or None for a model without them."""
        try:
            return None if self._raw is None else self._raw(name)
        except UnsupportedError:
            return None

    def _norm(self, name: str, size: int) -> np.ndarray:
        return self._finite(name, self._tensors.norm(name, size, torch.float32).contiguous().numpy())

    @staticmethod
    def _finite(name: str, values: np.ndarray) -> np.ndarray:
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {name!r}: a weight is not finite")
        return values
