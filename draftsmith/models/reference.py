"""The reference backend: a decoder in PyTorch, on CPU or CUDA, in float32, bfloat16 or float64.

Called by the engine and by standalone draft models through `Backend`; the oracle of faster backends.
Rows of all sequences share one packed matrix for everything but attention. Invariant: whatever does not
depend on the layer (positions, rotations, masks, cache views) is computed once per step.

Shape letters: N packed rows, R logit rows, D width, V vocabulary, H query heads, J kv heads, K head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from draftsmith.errors import OptionError
from draftsmith.models.attention import GroupPlan, attend, plan_group
from draftsmith.models.attention_mask import row_depths
from draftsmith.models.backend import Backend, RowGroup, Scored
from draftsmith.models.kv_cache import KVCache
from draftsmith.models.rope import RotaryTable
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import DecoderWeights, LayerWeights, Load, WeightReader

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class ReferenceBackend(Backend):
    """A decoder described by a spec, with weights in memory."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.cache = KVCache(spec, dtype=dtype, device=device)
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._exact = torch.promote_types(dtype, torch.float32)
        self._is_half = self._exact != dtype
        self._norm_eps = torch.tensor(spec.norm_eps, dtype=self._exact, device=device)
        # Rounded to float32 and then to the model's dtype, as the published implementations round it.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=torch.float32).to(dtype).item()
        self._rotary = [
            RotaryTable(
                spec.rope if window is None else spec.window_rope, spec.head_dim, dtype=self._exact, device=device
            )
            for window in self.cache.windows
        ]

    @classmethod
    def from_weights(
        cls,
        spec: DecoderSpec,
        load: Load,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        threads: int | None = None,
    ) -> ReferenceBackend:
        """Load a decoder; `load(name)` gives a tensor by its Hugging Face name, `KeyError` if there is none.

        `threads` sets the number of threads of PyTorch for the whole process (None leaves it). Raises
        `ModelFileError` for a missing or misshapen tensor, `OptionError` for a dtype or thread count.
        """
        if dtype not in _DTYPES:
            allowed = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
            raise OptionError(f"dtype {str(dtype).removeprefix('torch.')} is not supported; allowed: {allowed}")
        if threads is not None:
            if threads < 1:
                raise OptionError(f"threads is {threads}: at least 1 is needed")
            torch.set_num_threads(threads)
        where = torch.device(device)
        with torch.no_grad():
            weights = WeightReader(spec, load, dtype=dtype, device=where).read()
        return cls(spec, weights, dtype=dtype, device=where)

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._weights.embed(tokens.to(self._device)).to(torch.float32) * self._embedding_scale

    @torch.no_grad()
    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._weights.head.weight_rows(tokens.to(self._device)).to(torch.float32)

    @torch.no_grad()
    def score(self, groups: Sequence[RowGroup], taps: frozenset[int | str] = frozenset()) -> Scored:
        self.check_request(groups, taps)
        if not groups:
            return Scored(logits=[], taps=[])
        plans = self._plan(groups)
        hidden_ND, taken = self._decode(groups, plans, taps)
        if "last_hidden" in taps:
            hidden_ND = taken["last_hidden"] = self._normed(hidden_ND, self._weights.final_norm)
        logits = self._logits(hidden_ND, groups, plans, is_normed="last_hidden" in taps)
        return Scored(logits=logits, taps=_split_taps(taken, plans))

    # Inference mode saves a sixth of the cost per operation, but what it makes is of no use to a trainer or
    # to in-place code; logits and taps are therefore made outside it.
    @torch.inference_mode()
    def _decode(
        self, groups: Sequence[RowGroup], plans: Sequence[GroupPlan], taps: frozenset[int | str]
    ) -> tuple[torch.Tensor, dict[int | str, torch.Tensor]]:
        """All layers: the last hidden state before the final norm [N, D], and the taps by layer count."""
        tokens = torch.tensor([token for group in groups for token in group.tokens], dtype=torch.int64)
        rotations = self._rotations(groups)
        taken: dict[int | str, torch.Tensor] = {}
        hidden_ND = self._weights.embed(tokens.to(self._device))
        if self._embedding_scale != 1.0:
            hidden_ND = hidden_ND * self._embedding_scale
        for layer, weights in enumerate(self._weights.layers):
            if layer in taps:
                taken[layer] = hidden_ND
            kind = self.cache.layer_kinds[layer]
            mixed = self._attention(weights, hidden_ND, rotations[kind], plans, layer)
            hidden_ND = hidden_ND + self._normed(mixed, weights.attention_out_norm)
            hidden_ND = hidden_ND + self._normed(self._mlp(weights, hidden_ND), weights.mlp_out_norm)
        if self.spec.num_layers in taps:
            taken[self.spec.num_layers] = hidden_ND
        return hidden_ND, taken

    def _plan(self, groups: Sequence[RowGroup]) -> list[GroupPlan]:
        plans, start = [], 0
        for group in groups:
            committed = self.cache.committed(group.sequence_id)
            self.cache.append(group.sequence_id, group.tokens, group.parents)
            states = self.cache.layers(group.sequence_id)
            plans.append(plan_group(self.spec, states, self.cache.windows, committed, group.parents, start))
            start += len(group.tokens)
        return plans

    def _rotations(self, groups: Sequence[RowGroup]) -> list[torch.Tensor]:
        """Per layer kind, what multiplies each packed row's qkv as complex numbers [N, (H + 2 J) K/2].

        Queries take the attention's scale along. Values turn by nothing: one product over the whole row is
        cheaper than one over a part of it.
        """
        positions: list[int] = []
        for group in groups:
            committed = self.cache.committed(group.sequence_id)
            positions.extend([committed + depth for depth in row_depths(group.parents)])
        rows = torch.tensor(positions, dtype=torch.int64).to(self._device)
        longest = max(positions) + 1
        num_heads, num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        rotations = []
        for table in self._rotary:
            turn = table.rows(rows, longest)
            full = turn.new_ones(len(positions), num_heads + 2 * num_kv_heads, self.spec.head_dim // 2)
            full[:, : num_heads + num_kv_heads] = turn
            full[:, :num_heads].mul_(self.spec.attention_scale)
            rotations.append(full.flatten(1))
        return rotations

    def _attention(
        self,
        weights: LayerWeights,
        hidden_ND: torch.Tensor,
        rotation: torch.Tensor,
        plans: Sequence[GroupPlan],
        layer: int,
    ) -> torch.Tensor:
        spec = self.spec
        kind, place = self.cache.layer_kinds[layer], self.cache.layer_places[layer]
        packed = weights.qkv(self._normed(hidden_ND, weights.attention_norm))
        if self._is_half:
            packed = packed.to(self._exact)
        if weights.qk_norm is not None:
            heads_NHK = packed.view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
            rotated_NHK = heads_NHK.narrow(1, 0, spec.num_heads + spec.num_kv_heads)
            rotated_NHK.mul_(self._inverse_norm(rotated_NHK)).mul_(weights.qk_norm)
        packed.view(rotation.dtype).mul_(rotation)
        if self._is_half:
            packed = packed.to(self._dtype)
        return weights.output(attend(spec, packed, plans, kind, place))

    def _mlp(self, weights: LayerWeights, hidden_ND: torch.Tensor) -> torch.Tensor:
        gate, up = weights.gate_up(self._normed(hidden_ND, weights.mlp_norm)).chunk(2, dim=-1)
        active = F.silu(gate) if self.spec.activation == "silu" else F.gelu(gate, approximate="tanh")
        return weights.down(active.mul_(up))

    def _normed(self, hidden_ND: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Root-mean-square norm in float32 or better; without a weight there is no norm here."""
        if weight is None:
            return hidden_ND
        if self._is_half:
            exact = hidden_ND.to(self._exact)
            return (exact * self._inverse_norm(exact)).mul_(weight).to(self._dtype)
        return (hidden_ND * self._inverse_norm(hidden_ND)).mul_(weight)

    def _inverse_norm(self, exact: torch.Tensor) -> torch.Tensor:
        """1 / sqrt(mean of squares + eps) along the last dimension, kept.

        Three operations; `F.rms_norm` is a chain of eight on the CPU and six times slower on 512 rows.
        """
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        return torch.addcmul(self._norm_eps, length, length, value=1 / exact.shape[-1]).rsqrt_()

    def _logits(
        self, hidden_ND: torch.Tensor, groups: Sequence[RowGroup], plans: Sequence[GroupPlan], is_normed: bool
    ) -> list[torch.Tensor]:
        """Per group, logits [R, V] of its rows from `first_logit` on."""
        wanted = [
            hidden_ND[plan.start + group.first_logit : plan.start + plan.num_rows]
            for group, plan in zip(groups, plans, strict=True)
        ]
        counts = [len(part) for part in wanted]
        if not any(counts):
            return [hidden_ND.new_empty(0, self.spec.vocab_size, dtype=self._exact) for _ in groups]
        rows = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        if not is_normed:
            rows = self._normed(rows, self._weights.final_norm)
        logits = self._weights.head(rows).to(self._exact)
        if self.spec.logit_cap is not None:
            logits = logits.div_(self.spec.logit_cap).tanh_().mul_(self.spec.logit_cap)
        return list(logits.split(counts))


def _split_taps(
    taken: Mapping[int | str, torch.Tensor], plans: Sequence[GroupPlan]
) -> list[dict[int | str, torch.Tensor]]:
    return [
        {tap: hidden.narrow(0, plan.start, plan.num_rows).clone() for tap, hidden in taken.items()} for plan in plans
    ]
