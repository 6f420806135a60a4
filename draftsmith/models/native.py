"""The native backend: a decoder in C++ over 4-bit and 8-bit integer weights, for CPUs.

Called by the engine and by standalone draft models through `Backend`; the work happens in
`native/decoder.hpp`. Invariant: what a row gives depends, bit for bit, on its own tokens alone: not on the
rows scored with it, nor on threads or the place of a key in the cache. GGUF blocks are packed as they are,
without a second quantisation, wherever their type has an exact place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from draftsmith.errors import CapacityError, DraftsmithError, OptionError, UnsupportedError
from draftsmith.models.attention_mask import row_depths
from draftsmith.models.backend import Backend, RowGroup, Scored
from draftsmith.models.fork_lock import ForkLock
from draftsmith.models.kv_cache import KVCache
from draftsmith.models.layer_state import LayerState
from draftsmith.models.native_weights import Packer, Raw
from draftsmith.models.rope import cosines_and_sines, inverse_frequencies
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import Load

if TYPE_CHECKING:
    from draftsmith import _native

CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TILE = 16
_FIRST_POSITIONS = 512
# They spin while they wait; no machine gains from this many.
_MAX_THREADS = 1024
_INT_MAX = 2**31 - 1
# What single precision holds with all its digits.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


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


def usable_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
    """A decoder described by a spec, with packed weights in memory.

    `embedding`, `head`: packed rows of the vocabulary, which drafters on the same threads may share.
    """

    def __init__(self, spec: DecoderSpec, weights: Packer, options: NativeOptions, threads: int) -> None:
        from draftsmith import _native

        self.spec = spec
        self.options = options
        self.threads = threads
        self.cache = KVCache(
            spec, dtype=CACHE_DTYPES[options.cache], device=torch.device("cpu"), key_block=_native.KEY_BLOCK
        )
        layers = [
            {
                **weights.layer(layer),
                "kind": self.cache.layer_kinds[layer],
                "place": self.cache.layer_places[layer],
                # A window beyond every context hides nothing, whatever the number.
                "window": min(spec.layer_windows[layer] or 0, _INT_MAX),
            }
            for layer in range(spec.num_layers)
        ]
        self.embedding, self.head, final_norm = weights.ends()
        try:
            self._decoder = _native.Decoder(
                _shape(spec),
                layers,
                self.embedding,
                self.head,
                final_norm,
                cache_type=options.cache,
                threads=threads,
                pin=options.pin,
                kernels=options.kernels,
            )
        except RuntimeError as error:  # of the system, about threads
            raise OptionError(f"threads is {threads}: {error}") from error
        self._steps = ForkLock()
        self._ropes = [spec.rope if window is None else spec.window_rope for window in self.cache.windows]
        self._rotations: list[list[tuple[np.ndarray, np.ndarray]]] = []
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
        option, `CapacityError` where memory is short.
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
        threads = threads or usable_processors()
        try:
            with Packer(spec, load, raw, options.bits, threads) as packer:
                backend = cls(spec, packer, options, threads)
        except MemoryError as error:
            raise CapacityError("the weights of this model do not fit into memory") from error
        packer.tell()
        return backend

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @property
    def kernels(self) -> str:
        """Name of the instruction set in use."""
        return self._decoder.kernels

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return _rows(self.embedding, tokens).mul_(self.spec.embedding_scale)

    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return _rows(self.head, tokens)

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
        layers = [tap for tap in taps if isinstance(tap, int)]
        try:
            # From numpy, which asks for huge pages: PyTorch's small ones have to be cleared one by one.
            logits = np.empty((len(logit_rows), self.spec.vocab_size), np.float32)
            taken: dict[int | str, torch.Tensor] = {tap: torch.empty(len(tokens), self.spec.width) for tap in taps}
            step = (
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
            with self._steps.lock:
                if longest > self._num_positions:
                    self._grow_rotations(max(longest, 2 * self._num_positions))
                self._decoder.score(*step)
        except (ValueError, OverflowError) as error:
            raise DraftsmithError(f"the native backend was asked for something impossible: {error}") from error
        except MemoryError as error:
            raise CapacityError(f"a step of {len(tokens)} rows does not fit into memory") from error
        return Scored(
            logits=_parts(torch.from_numpy(logits), [len(group.tokens) - group.first_logit for group in groups]),
            taps=_split_taps(taken, [len(group.tokens) for group in groups]),
        )

    def _grow_rotations(self, num_positions: int) -> None:
        tables = []
        for rope in self._ropes:
            frequencies = inverse_frequencies(rope, self.spec.head_dim)
            cosines, sines = cosines_and_sines(frequencies, rope.attention_factor, num_positions)
            tables.append((cosines.numpy(), sines.numpy()))
        # The decoder reads this memory. An interrupt may come anywhere, so what it may still read goes last.
        self._rotations.append(tables)
        for kind, table in enumerate(tables):
            self._decoder.set_rotation(kind, *table)
        self._num_positions = num_positions
        del self._rotations[:-1]


def _rows(packed: _native.Packed, tokens: torch.Tensor) -> torch.Tensor:
    """Rows [N, D] of a packed matrix as float32."""
    if len(tokens) == 0:
        return torch.empty(0, packed.inputs)
    return torch.from_numpy(packed.select(tokens.to("cpu", torch.int32).numpy()).dequantise())


def _parts(rows: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Each group's rows; those of a group alone as they are, which saves microseconds of every step."""
    return [rows] if len(counts) == 1 else list(rows.split(list(counts)))


def _split_taps(taken: Mapping[int | str, torch.Tensor], counts: Sequence[int]) -> list[dict[int | str, torch.Tensor]]:
    parts: list[dict[int | str, torch.Tensor]] = [{} for _ in counts]
    for tap, rows in taken.items():
        for part, of_group in zip(parts, _parts(rows, counts), strict=True):
            part[tap] = of_group
    return parts


def _shape(spec: DecoderSpec) -> dict[str, Any]:
    numbers = {
        "norm_eps": spec.norm_eps,
        "attention_scale": spec.attention_scale,
        "attention_cap": spec.attention_cap or 0.0,
        "logit_cap": spec.logit_cap or 0.0,
        "embedding_scale": spec.embedding_scale,
    }
    for name, number in numbers.items():
        if number and not _LEAST <= abs(number) <= _MOST:
            raise UnsupportedError(f"the config's numbers make {name} {number}, which single precision cannot hold")
    return numbers | {
        "width": spec.width,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "mlp_width": spec.mlp_width,
        "vocab_size": spec.vocab_size,
        "is_gelu": spec.activation == "gelu_tanh",
    }
