"""Planted faults of cache, step, stop rules and prefix reuse; registered beside those of the verifier.

Import this module to have them in `tests.faults.FAULTS` under the layer "engine".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.core.types import Verdict
from draftsmith.drafters import draft_model
from draftsmith.engine import prefix, sequence, step, stop
from draftsmith.models.kv_cache import KVCache
from draftsmith.models.layer_state import FullState
from draftsmith.models.reference import ReferenceBackend
from tests.faults import fault


@fault("keep moves nothing", layer="engine")
def _keep_without_compaction(patch: pytest.MonkeyPatch) -> None:
    """Accepted rows of a tree stay where they were drafted."""
    patch.setattr(FullState, "keep", lambda self, committed, path, in_place: None)


@fault("keep is off by one", layer="engine")
def _keep_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """The last accepted row is dropped from the cache, though its token counts as written."""
    real = KVCache.keep

    def keep(self: KVCache, sequence_id: int, path: list[int]) -> None:
        if len(path) > 2:
            tokens = list(self._slots[sequence_id].pending_tokens)
            real(self, sequence_id, path[:-1])
            self._slots[sequence_id].tokens.append(tokens[path[-1]])
            for state in self._slots[sequence_id].layers:
                at = self.committed(sequence_id) - 1
                state.slots(at, at + 1).zero_()
        else:
            real(self, sequence_id, path)

    patch.setattr(KVCache, "keep", keep)


@fault("rejected rows are kept", layer="engine")
def _keep_rejected(patch: pytest.MonkeyPatch) -> None:
    """Rejected drafted rows stay visible in front of the next root (its row lands behind them)."""
    real = step.Slot.kept_rows

    def kept_rows(self: step.Slot) -> list[int]:
        rows = real(self)
        parents = self.rows().parents
        following = [row for row in range(len(parents)) if rows and row > rows[-1] and parents[row] == rows[-1]]
        return rows + following[:1]

    patch.setattr(step.Slot, "kept_rows", kept_rows)


@fault("positions count slots, not depth", layer="engine")
def _positions_by_slot(patch: pytest.MonkeyPatch) -> None:
    """A tree node is rotated by its place among the rows instead of its depth."""
    from draftsmith.models import attention, reference

    real = attention.row_depths
    for module in (attention, reference):
        patch.setattr(module, "row_depths", lambda parents: list(range(len(real(parents)))))


@fault("siblings see each other", layer="engine")
def _causal_mask_for_trees(patch: pytest.MonkeyPatch) -> None:
    """The tree mask is replaced by a causal one over the new rows."""
    from draftsmith.models import reference

    real = reference.plan_group

    def plan_group(spec: Any, states: Any, windows: Any, committed: int, parents: Any, start: int) -> Any:
        return real(spec, states, windows, committed, range(-1, len(parents) - 1), start)

    patch.setattr(reference, "plan_group", plan_group)


@fault("only the last token of a block is checked for its end", layer="engine")
def _stop_at_last_only(patch: pytest.MonkeyPatch) -> None:
    """Conformance STOP: end ids and strings inside an accepted block are passed over."""
    real = sequence.Sequence.settle
    rules = stop.StopRules.add

    def settle(self: Any, verdict: Verdict, *args: Any) -> Verdict:
        seen = []

        def add(self: Any, token: int) -> tuple[str, str | None]:
            seen.append(token)
            text, reason = rules(self, token)
            return text, reason if len(seen) == len(verdict.tokens) else None

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(stop.StopRules, "add", add)
            return real(self, verdict, *args)

    patch.setattr(sequence.Sequence, "settle", settle)


@fault("the bonus token passes the limit", layer="engine")
def _limit_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Conformance LEN: one token more than asked for."""
    real = stop.StopRules.__init__

    def init(self: Any, detokenizer: Any, end_ids: Any, strings: Any, limit: int, min_tokens: int) -> None:
        real(self, detokenizer, end_ids, strings, limit + 1, min_tokens)

    patch.setattr(stop.StopRules, "__init__", init)


@fault("text goes on to the end of the block", layer="engine")
def _text_past_the_stop(patch: pytest.MonkeyPatch) -> None:
    """Conformance STOP: the stop string is found, but ids of the whole block stay."""
    real = sequence.Sequence.settle

    def settle(self: Any, verdict: Verdict, *args: Any) -> Verdict:
        cut = real(self, verdict, *args)
        self.view.tokens.extend(verdict.tokens[len(cut.tokens) :])
        return cut

    patch.setattr(sequence.Sequence, "settle", settle)


@fault("logprobs come from the root's row", layer="engine")
def _logprobs_of_the_root(patch: pytest.MonkeyPatch) -> None:
    """Conformance LOGP: every token of a block gets the first row's logprobs."""
    real = sequence.Sequence._logprobs

    def logprobs(self: Any, verdict: Verdict, logits_TV: torch.Tensor) -> Any:
        return real(self, verdict, logits_TV[:1].expand_as(logits_TV))

    patch.setattr(sequence.Sequence, "_logprobs", logprobs)


@fault("penalties forget emitted tokens", layer="engine")
def _sampler_not_told(patch: pytest.MonkeyPatch) -> None:
    """Only the last emitted token of a block joins the sampler's history."""
    from draftsmith.core.sampling import Sampler

    real = Sampler.append
    patch.setattr(Sampler, "append", lambda self, tokens: real(self, tokens[-1:]))


@fault("batch rows in another order than batch logits", layer="engine")
def _batch_swapped(patch: pytest.MonkeyPatch) -> None:
    """Conformance BATCH (vllm#14645): two sequences get each other's logits."""
    real = ReferenceBackend.score

    def score(self: Any, groups: Any, taps: Any = frozenset()) -> Any:
        scored = real(self, groups, taps)
        logits = list(scored.logits)
        sizes = [len(rows) for rows in logits]
        for left in range(len(logits) - 1):
            if sizes[left] == sizes[left + 1] > 0:
                logits[left], logits[left + 1] = logits[left + 1], logits[left]
                break
        return replace(scored, logits=logits)

    patch.setattr(ReferenceBackend, "score", score)


@fault("a reused prefix is one token too long", layer="engine")
def _prefix_too_long(patch: pytest.MonkeyPatch) -> None:
    """Conformance CACHE: the fork takes a row of the other sequence's continuation."""
    real = prefix._common_prefix_len

    def common(left: Any, right: Any, limit: int) -> int:
        return min(real(left, right, limit) + 1, limit, len(left))

    patch.setattr(prefix, "_common_prefix_len", common)


@fault("the draft cache is not cut after a rejection", layer="engine")
def _draft_cache_not_cut(patch: pytest.MonkeyPatch) -> None:
    """Conformance KV: a standalone drafter's rows drift from its tokens. Lossless, so seen by acceptance alone."""
    real = draft_model._common_len
    patch.setattr(draft_model, "_common_len", lambda left, right: min(real(left, right) + 1, len(left), len(right)))
