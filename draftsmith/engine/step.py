"""The one kind of step: score n new rows of each sequence, keep m of them.

Called by the scheduler with a plan. Prompt chunk, plain decode and verification differ only in how many
rows a slot brings and keeps. Invariants: every scored row is settled by exactly one `cache.keep`; after
the step the cache has committed all tokens of a live sequence but its root; an error raised on purpose
(an unsound combination, a broken row) ends the sequences it concerns and nobody else's.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from time import perf_counter

import torch

from draftsmith.control.base import Controller, RequestOutcome, StepSeconds
from draftsmith.core.chance import KeyedChance
from draftsmith.core.inexact import InexactRule
from draftsmith.core.stats import EventLog, RequestStepRecord, StepRecord
from draftsmith.core.tree import depths
from draftsmith.core.types import Proposal, ProposalKind, Verdict
from draftsmith.core.verify import verify
from draftsmith.drafters.base import Commit, Drafter, Tap
from draftsmith.engine.sequence import Sequence
from draftsmith.errors import DraftsmithError, UnsoundError
from draftsmith.models.backend import Backend, RowGroup


@dataclass(slots=True)
class Slot:
    """One sequence's part in a step.

    `committed`: rows the cache holds. `num_known`: known tokens scored now (the root alone, or a prompt
    chunk). `draws`: the known tokens end with the root, so this step emits. `from_prompt`: prompt rows
    are scored, so nothing is drafted and the step is left out of tokens per step. `budget`: nodes to draft.
    """

    sequence: Sequence
    committed: int
    num_known: int
    draws: bool
    from_prompt: bool
    budget: int = 0
    proposal: Proposal = field(init=False)
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        self.proposal = Proposal.empty(self.sequence.view.root)

    def rows(self) -> RowGroup:
        """The slot's new rows: known tokens as a chain, drafted nodes below the last of them."""
        tokens = self.sequence.view.tokens[self.committed : self.committed + self.num_known]
        parents = list(range(-1, self.num_known - 1))
        tree = self.proposal.tree
        if tree.num_drafted:
            shift = self.num_known - 1
            tokens.extend(tree.tokens[1:])
            parents.extend(parent + shift for parent in tree.parents[1:])
        first_logit = self.num_known - 1 if self.draws else self.num_known
        return RowGroup(self.sequence.id, tokens, parents, first_logit)

    def kept_rows(self) -> list[int]:
        """Indices of the rows to keep: all known ones and the accepted path, less the new root."""
        kept = list(range(self.num_known))
        if self.verdict is not None:
            shift = self.num_known - 1
            kept.extend(node + shift for node in self.verdict.path[: self.verdict.num_emitted - 1])
        return kept


def run_step(plan: Series[Slot], target: Backend, controller: Controller, log: EventLog, step: int) -> None:
    """Draft, score, verify, keep, report: one step of the whole batch."""
    began = perf_counter()
    _draft([slot for slot in plan if slot.budget > 0], controller)
    drafted = perf_counter()
    needs: frozenset[Tap] = frozenset().union(*(slot.sequence.drafter.needs for slot in plan))
    scored = target.score([slot.rows() for slot in plan], needs)
    verified = perf_counter()
    for slot, logits_TV in zip(plan, scored.logits, strict=True):
        if slot.draws and slot.sequence.live:
            _verify(slot, logits_TV)
    sampled = perf_counter()
    for slot, logits_TV in zip(plan, scored.logits, strict=True):
        if slot.sequence.cancelled:
            slot.verdict = None  # cancelled while the target was scoring: nothing of this step is handed out
        elif slot.verdict is not None:
            slot.verdict = slot.sequence.settle(slot.verdict, slot.proposal, logits_TV, slot.from_prompt)
    for slot in plan:
        target.cache.keep(slot.sequence.id, slot.kept_rows())
    _commit(plan, scored.taps)
    rows = sum(slot.num_known + slot.proposal.tree.num_drafted for slot in plan)
    seconds = StepSeconds(rows, drafted - began, verified - drafted, sampled - verified)
    _report(plan, controller, log, step, seconds)
    log.append_step(
        StepRecord(
            step=step,
            rows=rows,
            requests=len(plan),
            context=sum(slot.committed for slot in plan),
            draft_seconds=seconds.draft,
            verify_seconds=seconds.verify,
            sample_seconds=seconds.sample,
            other_seconds=perf_counter() - began - seconds.draft - seconds.verify - seconds.sample,
        )
    )


def _draft(slots: Series[Slot], controller: Controller) -> None:
    if not slots:
        return
    by_drafter: dict[int, list[Slot]] = {}
    for slot in slots:
        by_drafter.setdefault(id(slot.sequence.drafter), []).append(slot)
    for group in by_drafter.values():
        drafter = group[0].sequence.drafter
        try:
            proposals = drafter.propose(
                [slot.sequence.view for slot in group], [slot.budget for slot in group], controller.keep_drafting
            )
        except DraftsmithError as error:
            for slot in group:
                slot.sequence.fail(error)
            continue
        for slot, proposal in zip(group, proposals, strict=True):
            assert proposal.tree.num_drafted <= slot.budget, "a drafter exceeded its budget"
            slot.proposal = proposal
    selected = controller.select([slot.proposal for slot in slots])
    for slot, proposal in zip(slots, selected, strict=True):
        sampled = slot.proposal.kind is not ProposalKind.POINT_MASS
        slot.proposal = proposal
        if sampled and controller.looks_at_tokens and not slot.sequence.view.sampler.greedy:
            unsound = UnsoundError(
                f"controller {type(controller).__name__} looks at drafted tokens it may drop, which changes the law of "
                f"sampled proposals (drafter {slot.sequence.drafter_name}); use rule coupling or another controller"
            )
            slot.sequence.fail(unsound)


def _verify(slot: Slot, logits_TV: torch.Tensor) -> None:
    view = slot.sequence.view
    rule = view.sampler.params.rule
    try:
        if isinstance(rule, InexactRule):
            chance = KeyedChance(view.random, view.position)
            slot.verdict, view.memory = rule.verify(slot.proposal, logits_TV, view.sampler, chance, view.memory)
        else:
            slot.verdict = verify(slot.proposal, logits_TV, view.sampler, view.random, view.position)
    except DraftsmithError as error:
        slot.sequence.fail(error)


def _commit(plan: Series[Slot], taps: Series[Mapping[Tap, torch.Tensor]]) -> None:
    by_drafter: dict[int, tuple[Drafter, list[Commit]]] = {}
    for slot, rows in zip(plan, taps, strict=True):
        drafter = slot.sequence.drafter
        kept = slot.kept_rows()
        # They ascend, so this tells whether they are the first ones: a slice costs a quarter of an indexed copy.
        where = slice(len(kept)) if kept and kept[-1] == len(kept) - 1 else kept
        commits = by_drafter.setdefault(id(drafter), (drafter, []))[1]
        commits.append(Commit(slot.sequence.view, slot.verdict, {tap: rows[tap][where] for tap in drafter.needs}))
    for drafter, commits in by_drafter.values():
        drafter.commit(commits)


def _report(plan: Series[Slot], controller: Controller, log: EventLog, step: int, seconds: StepSeconds) -> None:
    outcomes = []
    for slot in plan:
        sequence, verdict, tree = slot.sequence, slot.verdict, slot.proposal.tree
        accepted = verdict.num_accepted if verdict else 0
        emitted = verdict.num_emitted if verdict else 0
        depth = max(depths(tree.parents)) if tree.num_drafted else 0
        log.append_request(
            RequestStepRecord(
                step=step,
                request=sequence.id,
                position=sequence.view.position - emitted,
                drafter=sequence.drafter_name,
                drafted=tree.num_drafted,
                depth=depth,
                accepted=accepted,
                emitted=emitted,
                stop_reason=sequence.finish_reason,
                prompt=slot.from_prompt,
            )
        )
        if not slot.from_prompt:
            outcomes.append(
                RequestOutcome(
                    sequence.id,
                    sequence.drafter_name,
                    tree.num_drafted,
                    depth,
                    accepted,
                    emitted,
                    verdict.tokens if verdict else (),
                )
            )
    if outcomes and len(outcomes) == len(plan):
        controller.observe(outcomes, seconds)
