"""Rows of a recurrent drafter in PyTorch: the runner that serves every module, and the reference of faster ones.

Made by `drafters.rows_choice`, called by `drafters.recurrent` through `RowRunner`. Projections run over the rows of
all sequences at once, attention sequence by sequence. Invariant: keys and values of a sequence's true rows stand first,
those of its speculative rows behind them, until the next `begin` writes over them.

Shape letters: N rows of all sequences, R new rows of one, T its rows so far, D width, J key heads, G query heads of
each, K head size, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from draftsmith.drafters.recurrent_module import RecurrentModule
from draftsmith.drafters.rows import Chain, ChainDraw, Level, RowRunner, TrueRows

_FIRST_ROWS = 64


@dataclass(slots=True)
class _State:
    """One sequence. `output`: the last true row's, None when it was cut. `parents`, `depths`, `outputs`: of the
    speculative rows, depth 1 right below the last true row.
    """

    keys_JTK: torch.Tensor
    values_JTK: torch.Tensor
    num_true: int = 0
    output: torch.Tensor | None = None
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.num_true + len(self.parents)

    def drop_speculative(self) -> None:
        self.parents, self.depths, self.outputs = [], [], []

    def output_of(self, row: int) -> torch.Tensor:
        output = self.outputs[row] if row >= 0 else self.output
        assert output is not None, "what followed the last true row was cut away with the row after it: feed it again"
        return output

    def store(self, keys_RJK: torch.Tensor, values_RJK: torch.Tensor) -> None:
        """Write rows behind the `num_rows` that are there."""
        start, stop = self.num_rows, self.num_rows + len(keys_RJK)
        if stop > self.keys_JTK.shape[1]:
            self.grow(max(stop, 2 * self.keys_JTK.shape[1]))
        self.keys_JTK[:, start:stop] = keys_RJK.transpose(0, 1)
        self.values_JTK[:, start:stop] = values_RJK.transpose(0, 1)

    def grow(self, capacity: int) -> None:
        held, (heads, _, size) = self.num_rows, self.keys_JTK.shape
        for name in ("keys_JTK", "values_JTK"):
            wider = self.keys_JTK.new_empty(heads, capacity, size)
            wider[:, :held] = getattr(self, name)[:, :held]
            setattr(self, name, wider)


@dataclass(frozen=True, slots=True)
class _Part:
    """New rows of one sequence; `visible_RT`: which rows each sees (None: all)."""

    state: _State
    tokens: Sequence[int]
    hidden_RD: torch.Tensor
    positions: Sequence[int]
    visible_RT: torch.Tensor | None


@final
class TorchRows(RowRunner):
    """Runs any `RecurrentModule`, in the precision of its weights."""

    def __init__(self, module: RecurrentModule) -> None:
        self._module = module
        shape = module.config
        # Keys and values; slots grow by doubling, so a token may hold twice its rows.
        self.bytes_per_token = 2 * 2 * shape.num_kv_heads * shape.head_dim * module.dtype.itemsize
        self._states: dict[int, _State] = {}
        self._turns = module.turn(torch.arange(0))
        ids = module.draft_ids.cpu().numpy()
        self._ids = None if ids[-1] == len(ids) - 1 else ids  # they ascend

    def num_rows(self, sequence_id: int) -> int:
        state = self._states.get(sequence_id)
        return state.num_true if state else 0

    @torch.no_grad()
    def append(self, groups: Sequence[TrueRows]) -> None:
        parts = []
        for group in groups:
            state = self._states.get(group.sequence_id)
            if state is None:
                state = self._states[group.sequence_id] = self._new_state(_FIRST_ROWS)
            state.drop_speculative()
            if len(group.tokens):
                parts.append(self._true_part(state, group))
        for part, outputs in zip(parts, self._run(parts), strict=True):
            part.state.num_true += len(part.tokens)
            part.state.output = outputs[-1]

    @torch.no_grad()
    def begin(self, groups: Sequence[TrueRows]) -> torch.Tensor:
        self.append(groups)
        outputs = [self._states[group.sequence_id].output_of(-1) for group in groups]
        return self._module.logits(torch.stack(outputs))

    @torch.no_grad()
    def extend(self, levels: Sequence[Level]) -> list[torch.Tensor]:
        parts = [self._speculative_part(self._states[level.sequence_id], level) for level in levels]
        found = []
        for level, part, outputs in zip(levels, parts, self._run(parts), strict=True):
            state = part.state
            state.depths.extend(1 + (state.depths[parent] if parent >= 0 else 0) for parent in level.parents)
            state.parents.extend(level.parents)
            state.outputs.extend(outputs)
            found.append(outputs)
        logits = self._module.logits(torch.cat(found))
        return list(logits.split([len(level.tokens) for level in levels]))

    @torch.no_grad()
    def chain(
        self,
        groups: Sequence[TrueRows],
        depths: Sequence[int],
        least: float = 0.0,
        draws: Sequence[ChainDraw | None] = (),
    ) -> list[Chain]:
        found = [Chain([], []) for _ in groups]
        draws = draws or [None] * len(groups)
        logits_SU = self.begin(groups)
        active = list(range(len(groups)))
        reach = [1.0] * len(groups)
        while True:
            top_S, places_S = logits_SU.max(dim=-1)
            probs = torch.exp(top_S - torch.logsumexp(logits_SU, dim=-1)).tolist()
            tokens = self._module.draft_ids[places_S].tolist()
            for index, logits_U, token, prob in zip(active, logits_SU, tokens, probs, strict=True):
                draw, step = draws[index], len(found[index].tokens)
                found[index].tokens.append(token if draw is None else draw.token(logits_U, step, self._ids))
                found[index].probs.append(prob)
                reach[index] *= prob
            active = [index for index in active if len(found[index].tokens) < depths[index] and reach[index] >= least]
            if not active:
                return found
            levels = [
                Level(groups[index].sequence_id, found[index].tokens[-1:], [len(found[index].tokens) - 2])
                for index in active
            ]
            logits_SU = torch.cat(self.extend(levels))

    def truncate(self, sequence_id: int, num_rows: int) -> None:
        state = self._states.get(sequence_id)
        if state is None or num_rows >= state.num_true:
            return
        if num_rows == 0:
            del self._states[sequence_id]
            return
        state.drop_speculative()
        state.num_true, state.output = num_rows, None

    def fork(self, source: int, copy: int, num_rows: int) -> None:
        self.forget(copy)
        state = self._states.get(source)
        if state is None or num_rows == 0:
            return
        assert num_rows <= state.num_true, f"{num_rows} rows of a sequence that has {state.num_true}"
        twin = self._states[copy] = self._new_state(max(num_rows, _FIRST_ROWS))
        twin.keys_JTK[:, :num_rows] = state.keys_JTK[:, :num_rows]
        twin.values_JTK[:, :num_rows] = state.values_JTK[:, :num_rows]
        twin.num_true = num_rows
        twin.output = state.output if num_rows == state.num_true else None

    def forget(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)

    # -- rows -------------------------------------------------------------------------------------

    def _new_state(self, capacity: int) -> _State:
        shape = self._module.config
        sizes = (shape.num_kv_heads, capacity, shape.head_dim)
        return _State(torch.empty(sizes, dtype=self._module.dtype), torch.empty(sizes, dtype=self._module.dtype))

    def _true_part(self, state: _State, group: TrueRows) -> _Part:
        before, size = state.num_true, len(group.tokens)
        places = torch.arange(before + size)
        visible_RT = None if size == 1 else places[None] <= places[before:, None]
        hidden_RD = self._module.fuse(group.features.to(self._module.dtype))
        return _Part(state, group.tokens, hidden_RD, range(before, before + size), visible_RT)

    def _speculative_part(self, state: _State, level: Level) -> _Part:
        parents = [*state.parents, *level.parents]
        first = len(state.parents)
        outputs = torch.stack([state.output_of(parent) for parent in level.parents])
        depths = [1 + (state.depths[parent] if parent >= 0 else 0) for parent in level.parents]
        positions = [state.num_true - 1 + depth for depth in depths]
        visible_RT = None
        if len(level.parents) > 1 or any(parent != row - 1 for row, parent in enumerate(parents)):
            visible_RT = torch.zeros(len(level.parents), state.num_true + len(parents), dtype=torch.bool)
            visible_RT[:, : state.num_true] = True
            for row in range(len(level.parents)):
                seen = first + row
                while seen >= 0:
                    visible_RT[row, state.num_true + seen] = True
                    seen = parents[seen]
        return _Part(state, level.tokens, self._module.feedback(outputs), positions, visible_RT)

    def _run(self, parts: Sequence[_Part]) -> list[torch.Tensor]:
        """Outputs [R, D] of new rows; their keys and values are stored, counting them is the caller's."""
        if not parts:
            return []
        module = self._module
        tokens = torch.tensor([token for part in parts for token in part.tokens])
        positions = torch.tensor([place for part in parts for place in part.positions])
        entry = module.enter(module.embed(tokens), torch.cat([part.hidden_RD for part in parts]))
        heads = module.heads(entry, self._turn(positions))
        sizes = [len(part.tokens) for part in parts]
        mixed = []
        for part, queries, keys, values in zip(parts, *(rows.split(sizes) for rows in heads), strict=True):
            part.state.store(keys, values)
            mixed.append(_mix(part, queries))
        return list(module.finish(entry, torch.cat(mixed)).split(sizes))

    def _turn(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        longest = int(positions.max()) + 1
        if longest > len(self._turns[0]):
            self._turns = self._module.turn(torch.arange(max(2 * longest, 512)))
        cosines, sines = self._turns
        return cosines[positions], sines[positions]


def _mix(part: _Part, queries_RHK: torch.Tensor) -> torch.Tensor:
    """Attention [R, H, K] of a sequence's new rows, which are stored already, without copying keys per query head."""
    state, (num_rows, num_heads, size) = part.state, queries_RHK.shape
    num_keys = state.num_rows + num_rows
    keys_JTK, values_JTK = state.keys_JTK[:, :num_keys], state.values_JTK[:, :num_keys]
    groups = num_heads // len(keys_JTK)
    queries = queries_RHK.view(num_rows, -1, groups, size).permute(1, 2, 0, 3).reshape(len(keys_JTK), -1, size)
    scores = torch.matmul(queries * size**-0.5, keys_JTK.transpose(1, 2)).view(-1, groups, num_rows, num_keys)
    if part.visible_RT is not None:
        scores = scores.masked_fill(~part.visible_RT, float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(len(keys_JTK), -1, num_keys)
    mixed = torch.matmul(weights, values_JTK).view(-1, groups, num_rows, size)
    return mixed.permute(2, 0, 1, 3).reshape(num_rows, num_heads, size)
