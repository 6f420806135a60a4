"""One live sample: its tokens, its noise, its stop rules, its counts.

Owned by the scheduler; only the step changes it. Invariants: outside a step the target's cache has
committed at most `len(tokens) - 1` rows (the root is never fed early), and everything handed out
(ids, text, logprobs, origins, counts) ends at the same token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Series

import torch

from draftsmith.core.fidelity import Fidelity
from draftsmith.core.inexact import fidelity_of, rule_text
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler
from draftsmith.core.types import Proposal, Verdict
from draftsmith.core.view import SequenceView
from draftsmith.drafters.base import Drafter
from draftsmith.engine.params import GenerationParams
from draftsmith.engine.results import GenerationResult, Origin, RequestStatistics, TokenEvent, TokenLogprob
from draftsmith.engine.stop import StopRules
from draftsmith.engine.streams import Call


class Sequence:
    """One sample of one request."""

    __slots__ = (
        "_cost", "_fidelity", "_first_at", "_last_at", "_num_accepted", "_num_counted", "_num_drafted", "_num_steps",
        "_submitted_at", "call", "drafter", "drafter_name", "error", "finish_reason", "logprobs", "origins", "params",
        "preemptions", "reused", "sibling", "stop", "text_parts", "view",
    )  # fmt: skip

    def __init__(
        self,
        sequence_id: int,
        prompt_ids: Series[int],
        params: GenerationParams,
        sampler: Sampler,
        stop: StopRules,
        drafter: Drafter,
        random: RequestRandom,
    ) -> None:
        self.view = SequenceView(
            sequence_id=sequence_id,
            tokens=list(prompt_ids),
            prompt_len=len(prompt_ids),
            sampler=sampler,
            random=random,
        )
        self.params = params
        self.stop = stop
        self.drafter = drafter
        self.drafter_name = params.drafter or "none"
        self.sibling: Sequence | None = None
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.call = Call()
        self.text_parts: list[str] = []
        self.origins: list[Origin] = []
        self.logprobs: list[TokenLogprob] = []
        self.reused = 0
        self.preemptions = 0
        self._fidelity = fidelity_of(params.sampling.rule)
        self._cost = 0.0
        self._num_steps = 0
        self._num_counted = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._submitted_at = time.perf_counter()
        self._first_at: float | None = None
        self._last_at: float | None = None

    @property
    def id(self) -> int:
        """The sequence id shared with cache and drafter."""
        return self.view.sequence_id

    @property
    def index(self) -> int:
        """Which of the request's samples it is."""
        return self.view.random.sample

    @property
    def live(self) -> bool:
        """Whether it may still emit tokens."""
        return self.finish_reason is None and self.error is None

    @property
    def cancelled(self) -> bool:
        """Whether its caller has let go of it."""
        return self.call.cancelled

    @property
    def remaining(self) -> int:
        """Tokens it may still emit under `max_new_tokens`."""
        return self.params.max_new_tokens - self.view.position

    def join(self, call: Call) -> None:
        """Report to this call."""
        self.call = call
        call.sequences.append(self)
        call.num_live += 1

    def settle(self, verdict: Verdict, proposal: Proposal, logits_TV: torch.Tensor, from_prompt: bool) -> Verdict:
        """Emit a verdict's tokens one by one under the stop rules; returns the verdict cut where they ended it.

        `logits_TV` [T, V]: row i scored node i of the proposal. `from_prompt`: the step also scored
        prompt rows (left out of the counts).
        """
        text: list[str] = []
        emitted = 0
        reason = None
        for token in verdict.tokens:
            emitted += 1
            part, reason = self.stop.add(token)
            text.append(part)
            if reason is not None:
                break
        verdict = verdict if emitted == len(verdict.tokens) else verdict.cut(emitted)
        origins = _origins(verdict, proposal)
        logprobs = self._logprobs(verdict, logits_TV)
        self.view.tokens.extend(verdict.tokens)
        self.view.sampler.append(verdict.tokens)
        self.origins.extend(origins)
        if not from_prompt:
            self._num_steps += 1
            self._num_counted += verdict.num_emitted
            self._num_drafted += proposal.tree.num_drafted
            self._num_accepted += verdict.num_accepted
        self._cost += sum(verdict.costs or ())
        self._last_at = time.perf_counter()
        if self._first_at is None:
            self._first_at = self._last_at
        self._push(verdict.tokens, "".join(text), origins, logprobs, reason, verdict.costs)
        return verdict

    def end(self, reason: str) -> None:
        """End it from outside (it was cancelled): what is held back is handed out."""
        self._push((), self.stop.flush(), (), () if self.params.logprobs is not None else None, reason)

    def fail(self, error: BaseException) -> None:
        """End it with an error, which its caller meets; what has finished stays as it is."""
        if self.live:
            self.error = error
            self.call.error = self.call.error or error
            self.call.num_live -= 1

    def result(self) -> GenerationResult:
        """The finished sample."""
        tokens = tuple(self.view.tokens[self.view.prompt_len :])
        steps = self._num_steps
        now = self._last_at if self._last_at is not None else time.perf_counter()
        first = self._first_at if self._first_at is not None else now
        statistics = RequestStatistics(
            request=self.id,
            drafter=self.drafter_name,
            rule=rule_text(self.params.sampling.rule),
            fidelity=self._fidelity,
            total_variation=self._cost / max(1, len(tokens)) if self._fidelity is Fidelity.LOSSY else None,
            seed=self.view.random.seed,
            prompt_tokens=self.view.prompt_len,
            reused_tokens=self.reused,
            emitted_tokens=len(tokens),
            steps=steps,
            drafted_tokens=self._num_drafted,
            accepted_tokens=self._num_accepted,
            tokens_per_step=self._num_counted / steps if steps else 0.0,
            preemptions=self.preemptions,
            first_token_seconds=first - self._submitted_at,
            total_seconds=now - self._submitted_at,
        )
        return GenerationResult(
            text="".join(self.text_parts),
            token_ids=tokens,
            finish_reason=self.finish_reason or "length",
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            origins=tuple(self.origins),
            prompt_tokens=self.view.prompt_len,
            statistics=statistics,
        )

    def _push(
        self,
        tokens: tuple[int, ...],
        text: str,
        origins: tuple[Origin, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: str | None,
        costs: tuple[float, ...] | None = None,
    ) -> None:
        self.text_parts.append(text)
        self.call.events.append(TokenEvent(self.index, tokens, text, origins, logprobs, reason, self._fidelity, costs))
        if reason is not None:  # last of all: whoever sees the end finds everything in place
            self.finish_reason = reason
            self.call.num_live -= 1

    def _logprobs(self, verdict: Verdict, logits_TV: torch.Tensor) -> tuple[TokenLogprob, ...] | None:
        count = self.params.logprobs
        if count is None:
            return None
        nodes = [0, *verdict.path][: len(verdict.tokens)]  # token j was drawn from the row of the node above it
        logprobs_RV = torch.log_softmax(logits_TV[nodes].double(), dim=-1)
        entries = []
        for row_V, token in zip(logprobs_RV, verdict.tokens, strict=True):
            top: tuple[tuple[int, float], ...] = ()
            if count:
                values, ids = torch.topk(row_V, min(count, row_V.numel()))
                top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            entries.append(TokenLogprob(token, float(row_V[token]), top))
        self.logprobs.extend(entries)
        return tuple(entries)


def _origins(verdict: Verdict, proposal: Proposal) -> tuple[Origin, ...]:
    kept: list[Origin] = [Origin.ACCEPTED] * verdict.num_accepted
    if len(verdict.tokens) > len(verdict.path):
        if proposal.tree.num_drafted == 0:
            kept.append(Origin.PLAIN)
        else:
            last = verdict.path[-1] if verdict.path else 0
            kept.append(Origin.CORRECTED if last in proposal.tree.parents else Origin.BONUS)
    return tuple(kept)
