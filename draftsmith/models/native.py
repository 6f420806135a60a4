"""The native backend: a decoder in C++ over 4-bit and 8-bit integer weights, for CPUs.

Called by the engine and by standalone draft models through `Backend`; the work happens in
`native/decoder.hpp`. Invariant: what a row gives depends, bit for bit, on its own tokens alone: not on the
rows scored with it, nor on threads or the place of a key in the cache. GGUF blocks are packed as they are,
without a second quantisation, wherever their type has an exact place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch

from draftsmith.errors import DraftsmithError, ModelFileError, OptionError, UnsupportedError
from draftsmith.models.attention_mask import row_depths
from draftsmith.models.backend import Backend, RowGroup, Scored
from draftsmith.models.kv_cache import KVCache
from draftsmith.models.layer_state import LayerState
from draftsmith.models.rope import cosines_and_sines, inverse_frequencies
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import Load, TensorReader, check_shape

if TYPE_CHECKING:
    from draftsmith import _native

Raw: TypeAlias = Callable[[str], tuple[str, np.ndarray, tuple[int, ...]]]
"""A tensor as stored: ggml type name, bytes [rows, bytes of a row], logical shape."""

CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_FLOAT_TYPES = ("F32", "F16", "BF16")
_TILE = 16
_FIRST_POSITIONS = 512
# They spin while they wait; no machine gains from this many.
_MAX_THREADS = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NativeOptions:
    """Options of the native backend.

    `bits` (8 or 4): what weights are quantised to that are not stored in a format of integers. `cache`: what keys
    and values are kept in. `kernels`: an instruction set, or "auto" for the best here. `pin`: keep each thread on
    a processor of its own. Raises `OptionError`.
    """

    bits: int = 8
    cache: str = "float16"
    kernels: str = "auto"
    pin: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise OptionError(f"weights are quantised to 8 or 4 bits, not {self.bits}")
        if self.cache not in CACHE_DTYPES:
            raise OptionError(f"keys and values are kept in {', '.join(CACHE_DTYPES)}, not {self.cache!r}")


def why_not(spec: DecoderSpec, *, device: str | torch.device = "cpu") -> str | None:
    """Why the native backend cannot serve this model, in words that follow "the native backend"; None if it can."""
    try:
        from draftsmith import _native  # noqa: F401
    except ImportError:
        return "was not built at installation: it needs a C++ compiler"
    if torch.device(device).type != "cpu":
        return f"runs on the CPU, not on {device!r}"
    if spec.head_dim % _TILE:
        return f"needs heads of a multiple of {_TILE} dimensions, and this model's have {spec.head_dim}"
    return None


@final
class NativeBackend(Backend):
    """A decoder described by a spec, with packed weights in memory."""

    def __init__(self, spec: DecoderSpec, weights: _Packer, options: NativeOptions, threads: int) -> None:
        from draftsmith import _native

        self.spec = spec
        self.cache = KVCache(
            spec, dtype=CACHE_DTYPES[options.cache], device=torch.device("cpu"), key_block=_native.KEY_BLOCK
        )
        layers = [
            {
                **weights.layer(layer),
                "kind": self.cache.layer_kinds[layer],
                "place": self.cache.layer_places[layer],
                "window": spec.layer_windows[layer] or 0,
            }
            for layer in range(spec.num_layers)
        ]
        embedding, head, final_norm = weights.ends()
        try:
            self._decoder = _native.Decoder(
                _shape(spec),
                layers,
                embedding,
                head,
                final_norm,
                cache_type=options.cache,
                threads=threads,
                pin=options.pin,
                kernels=options.kernels,
            )
        except RuntimeError as error:  # of the system, about threads
            raise OptionError(f"threads is {threads}: {error}") from error
        self._ropes = [spec.rope if window is None else spec.window_rope for window in self.cache.windows]
        self._rotations: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_positions = 0
        self._grow_rotations(_FIRST_POSITIONS)

    @classmethod
    def from_weights(
        cls,
        spec: DecoderSpec,
        load: Load,
        *,
        raw: Raw | None = None,
        options: NativeOptions | None = None,
        device: str | torch.device = "cpu",
        threads: int | None = None,
    ) -> NativeBackend:
        """Load a decoder; `raw(name)` gives a tensor as stored, `load(name)` as floats, by Hugging Face names.

        `threads`: None takes the processors this process may use. Raises `ModelFileError` for a missing,
        misshapen or broken tensor, `UnsupportedError` for a model the kernels cannot serve, `OptionError` for an
        option.
        """
        options = options or NativeOptions()
        reason = why_not(spec, device=device)
        if reason is not None:
            raise UnsupportedError(f"the native backend {reason}; use the reference backend")
        if threads is not None and not 1 <= threads <= _MAX_THREADS:
            raise OptionError(f"threads is {threads}: at least 1 and at most {_MAX_THREADS} are allowed")
        from draftsmith import _native

        if options.kernels != "auto" and options.kernels not in _native.instruction_sets():
            known = ", ".join(_native.instruction_sets())
            raise OptionError(f"no instruction set {options.kernels!r} here; known are auto, {known}")
        threads = threads or len(os.sched_getaffinity(0))
        with _Packer(spec, load, raw, options.bits, threads) as packer:
            backend = cls(spec, packer, options, threads)
        packer.tell()
        return backend

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def kernels(self) -> str:
        """Name of the instruction set in use."""
        return self._decoder.kernels

    def score(self, groups: Sequence[RowGroup], taps: frozenset[int | str] = frozenset()) -> Scored:
        self.check_request(groups, taps)
        if not groups:
            return Scored(logits=[], taps=[])
        tokens: list[int] = []
        parents: list[int] = []
        committed: list[int] = []
        logit_rows: list[int] = []
        slots: list[LayerState] = []
        longest = 0
        for group in groups:
            behind = self.cache.committed(group.sequence_id)
            self.cache.append(group.sequence_id, group.tokens, group.parents)
            committed.append(behind)
            slots.extend(self.cache.layers(group.sequence_id))
            logit_rows.extend(range(len(tokens) + group.first_logit, len(tokens) + len(group.tokens)))
            tokens.extend(group.tokens)
            parents.extend(group.parents)
            longest = max(longest, behind + 1 + max(row_depths(group.parents)))
        if longest > self._num_positions:
            self._grow_rotations(max(longest, 2 * self._num_positions))
        # From numpy, which asks for huge pages: PyTorch's small ones have to be cleared one by one.
        logits = np.empty((len(logit_rows), self.spec.vocab_size), np.float32)
        taken: dict[int | str, torch.Tensor] = {tap: torch.empty(len(tokens), self.spec.width) for tap in taps}
        layers = [tap for tap in taps if isinstance(tap, int)]
        try:
            self._decoder.score(
                np.array(tokens, np.int32),
                np.array(parents, np.int32),
                np.array([len(group.tokens) for group in groups], np.int32),
                np.array(committed, np.int32),
                np.array([state.rows_LJCK.data_ptr() for state in slots], np.uint64),
                np.array([state.first for state in slots], np.int32),
                np.array([state.capacity for state in slots], np.int32),
                np.array(logit_rows, np.int32),
                logits,
                np.array(layers, np.int32),
                [taken[layer].numpy() for layer in layers],
                taken["last_hidden"].numpy() if "last_hidden" in taps else None,
            )
        except (ValueError, OverflowError) as error:
            raise DraftsmithError(f"the native backend was asked for something impossible: {error}") from error
        return Scored(
            logits=list(torch.from_numpy(logits).split([len(group.tokens) - group.first_logit for group in groups])),
            taps=_split_taps(taken, [len(group.tokens) for group in groups]),
        )

    def _grow_rotations(self, num_positions: int) -> None:
        rotations = []
        for kind, rope in enumerate(self._ropes):
            frequencies = inverse_frequencies(rope, self.spec.head_dim)
            cosines, sines = cosines_and_sines(frequencies, rope.attention_factor, num_positions)
            rotations.append((cosines.numpy(), sines.numpy()))
            self._decoder.set_rotation(kind, *rotations[kind])
        # The decoder reads this memory: the old tables may go only now.
        self._rotations, self._num_positions = rotations, num_positions


def _split_taps(taken: Mapping[int | str, torch.Tensor], counts: Sequence[int]) -> list[dict[int | str, torch.Tensor]]:
    parts: list[dict[int | str, torch.Tensor]] = [{} for _ in counts]
    for tap, rows in taken.items():
        for part, of_group in zip(parts, rows.split(list(counts)), strict=True):
            part[tap] = of_group
    return parts


def _shape(spec: DecoderSpec) -> dict[str, Any]:
    return {
        "width": spec.width,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "mlp_width": spec.mlp_width,
        "vocab_size": spec.vocab_size,
        "norm_eps": spec.norm_eps,
        "attention_scale": spec.attention_scale,
        "attention_cap": spec.attention_cap or 0.0,
        "logit_cap": spec.logit_cap or 0.0,
        "embedding_scale": spec.embedding_scale,
        "is_gelu": spec.activation == "gelu_tanh",
    }


class _Packer:
    """Reads tensors and packs them, several at a time."""

    def __init__(self, spec: DecoderSpec, load: Load, raw: Raw | None, bits: int, threads: int) -> None:
        self._spec = spec
        self._load = load
        self._raw = raw
        self._bits = bits
        self._tensors = TensorReader(spec, load)
        self._requantised: set[str] = set()
        self._workers = ThreadPoolExecutor(min(threads, os.cpu_count() or 1))
        self._pending = {name: self._workers.submit(self._pack, name, shape) for name, shape in self._linears()}

    def __enter__(self) -> _Packer:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown(cancel_futures=True)

    def tell(self) -> None:
        """Warn when stored weights had to be quantised again."""
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
