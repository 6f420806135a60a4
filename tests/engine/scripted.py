"""Drafters and controllers that do what a test tells them, and plain runs to compare with.

Used by the conformance tests. `Scripted` drafts what `Scripted.script(view, budget)` returns; `WrongAt` drafts
the plain run's continuation with one wrong token, so that every acceptance from 0 to K happens; `Switch` is a
controller that asks for drafts in spells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from draftsmith.control.base import Controller
from draftsmith.core.tree import chain
from draftsmith.core.types import Proposal
from draftsmith.drafters.base import Drafter
from tests.engine.fakes import VOCAB, OracleDrafter, tiny_engine

ORACLE = "tests.engine.fakes:OracleDrafter"
SCRIPTED = "tests.engine.scripted:Scripted"
WRONG_AT = "tests.engine.scripted:WrongAt"
SWITCH = "tests.engine.scripted:Switch"
DRAFTERS = [
    "ngram:min_ngram=1",
    "suffix:tree=true",
    "hybrid",
    "draft_model:model=other",
    "draft_model:model=other:tree=2x2",
    ORACLE,
    f"{ORACLE}:wrong_every=3",
    f"{ORACLE}:wrong_every=4:tree=true",
]
PROMPTS = [list(b"abc abc abc"), list(b"x"), list(b"the cat sat on the mat"), list(b"12 34 12 34 12")]


def plain_run(prompt, max_new_tokens=24, **params):
    """The run without drafts on the tiny model; the oracle drafters know it from then on."""
    result = tiny_engine(prefix_cache=False).generate(prompt, max_new_tokens=max_new_tokens, **params)
    for sample in result.samples or (result,):
        OracleDrafter.known.append([*prompt, *sample.token_ids, 1, 2, 3])
    return result


class Scripted(Drafter):
    """Asks `script(view, budget)` for every proposal."""

    script: ClassVar[Callable] = staticmethod(lambda view, budget: Proposal.empty(view.root))

    @classmethod
    def create(cls, options, target):
        return cls()

    def propose(self, views, budgets, keep_drafting):
        return [type(self).script(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def forget(self, sequence_id):
        pass


class WrongAt(Scripted):
    """Drafts `budget` tokens of a run the oracle knows, the one after `accepted` right ones wrong.

    `accepted` runs through 0, 1, ..., budget from proposal to proposal of a sequence.
    """

    def __init__(self):
        self._turns = {}

    def propose(self, views, budgets, keep_drafting):
        return [self._one(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def _one(self, view, budget):
        known = next(text for text in OracleDrafter.known if text[: len(view.tokens)] == view.tokens)
        drafted = (known + [0] * budget)[len(view.tokens) :][:budget]
        turn = self._turns[view.sequence_id] = self._turns.get(view.sequence_id, -1) + 1
        accepted = (turn + view.sequence_id) % (budget + 1)
        if accepted < budget:
            drafted[accepted] = (drafted[accepted] + 1) % VOCAB
        return Proposal(chain(view.root, drafted))


@dataclass(frozen=True, kw_only=True)
class SwitchOptions:
    """`on` steps with `num_draft` nodes, then `off` steps without any, and so on."""

    on: int = 2
    off: int = 3
    num_draft: int = 4


class Switch(Controller):
    """Drafting on and off, in spells."""

    Options = SwitchOptions

    def __init__(self, options):
        self._options = options
        self._turns = {}

    @classmethod
    def create(cls, options):
        return cls(options)

    def budget(self, signals):
        return [self._one(signal) for signal in signals]

    def _one(self, signal):
        options = self._options
        turn = self._turns[signal.sequence_id] = self._turns.get(signal.sequence_id, -1) + 1
        is_on = turn % (options.on + options.off) < options.on
        return min(options.num_draft, signal.max_draft) if is_on else 0

    def forget(self, sequence_id):
        self._turns.pop(sequence_id, None)
