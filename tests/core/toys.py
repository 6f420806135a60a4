"""Tiny models, drafters and laws for exact enumeration: what the verification tests are written with.

Everything here is a function of an explicit `ScriptedChance`, so `outcomes` explores drafts and
acceptances together. Drafted tokens are drawn when a rule first reads them: what it never looks at
is not enumerated, which keeps trees of nine nodes affordable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from draftsmith.core import draw
from draftsmith.core import tree as trees
from draftsmith.core.chance import ScriptedChance, outcomes
from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler, SamplingParams
from draftsmith.core.types import Law, Proposal, ProposalKind, Rule, Tree, Verdict
from draftsmith.core.verify import decide, verify

ROOT_TOKEN = 0
SHAPES: dict[str, tuple[int, ...]] = {
    "chain1": (-1, 0),
    "chain2": (-1, 0, 1),
    "chain3": (-1, 0, 1, 2),
    "wide2": (-1, 0, 0),
    "wide3": (-1, 0, 0, 0),
    "two_one": (-1, 0, 0, 1, 2),
    "two_two": (-1, 0, 0, 1, 1, 2, 2),
    "uneven": (-1, 0, 0, 0, 1, 1, 4),
    "depth_first": (-1, 0, 1, 2, 1, 0, 5),
}


class Toy:
    """A model over a tiny vocabulary: a fixed law for each sequence of tokens after the root."""

    def __init__(self, vocab_size: int, law: Callable[[tuple[int, ...]], Sequence[float]]) -> None:
        self.vocab_size = vocab_size
        self._law = law
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._recorded: dict[tuple[int, ...], Law] = {}

    @staticmethod
    def random(vocab_size: int, seed: int, sharpness: float = 1.0, zeros: int = 0) -> Toy:
        """A context-dependent random model; `zeros` tokens of every law have no mass."""

        def law(path: tuple[int, ...]) -> np.ndarray:
            generator = np.random.default_rng([seed, len(path), *path])
            weights = np.exp(sharpness * generator.normal(size=vocab_size))
            weights[generator.permutation(vocab_size)[:zeros]] = 0.0
            return weights / weights.sum()

        return Toy(vocab_size, law)

    @staticmethod
    def context_free(probs: Sequence[float]) -> Toy:
        return Toy(len(probs), lambda path: probs)

    def law(self, path: Sequence[int]) -> np.ndarray:
        path = tuple(path)
        if path not in self._known:
            self._known[path] = np.asarray(self._law(path), dtype=np.float64)
        return self._known[path]

    def logits(self, path: Sequence[int]) -> torch.Tensor:
        path = tuple(path)
        if path not in self._logits:
            with np.errstate(divide="ignore"):
                self._logits[path] = torch.from_numpy(np.log(self.law(path)))
        return self._logits[path]

    def recorded(self, path: Sequence[int]) -> Law:
        """The law as a drafter records it, float32 and sparse where that pays."""
        path = tuple(path)
        if path not in self._recorded:
            self._recorded[path] = draw.record_law(torch.from_numpy(self.law(path)))
        return self._recorded[path]


def sampler_of(vocab_size: int, rule: Rule, end_ids: Sequence[int] = (), **params: Any) -> Sampler:
    """The real sampler at temperature 1, bound to a prompt of the root alone."""
    settings = SamplingParams(temperature=1.0, rule=rule, **params)
    return Sampler(settings, (ROOT_TOKEN,), frozenset(end_ids), vocab_size)


class _Rows:
    """The target's logits per node, each computed from the tokens of the node's own path."""

    def __init__(self, tree: Tree, target: Toy) -> None:
        self._tree = tree
        self._target = target

    def __len__(self) -> int:
        return len(self._tree.tokens)

    def __getitem__(self, node: int) -> torch.Tensor:
        return self._target.logits(trees.path_tokens(self._tree, node))


def score(tree: Tree, target: Toy, emitted: tuple[int, ...] = ()) -> torch.Tensor:
    """The target's logits as the engine would deliver them, [T, V], after `emitted` tokens."""
    return torch.stack([target.logits((*emitted, *trees.path_tokens(tree, node))) for node in range(tree.num_nodes)])


def draw_child(chance: ScriptedChance, law: np.ndarray, kind: ProposalKind, earlier: Sequence[int]) -> int:
    """One sibling by the definition of its kind: removal, renormalising, uniform once nothing is left."""
    if kind is ProposalKind.POINT_MASS:
        order = sorted(range(len(law)), key=lambda token: (-law[token], token))
        return order[len(earlier)]
    left = law.copy()
    if kind is ProposalKind.WITHOUT_REPLACEMENT:
        left[list(earlier)] = 0.0
        if left.sum() == 0:
            left = np.array([float(token not in earlier) for token in range(len(law))])
    return chance.pick((left / left.sum()).tolist())


class _LazyTokens(Sequence[int]):
    def __init__(self, chance: ScriptedChance, draft: Toy, kind: ProposalKind, parents: tuple[int, ...]) -> None:
        self._chance, self._draft, self._kind, self._parents = chance, draft, kind, parents
        self._known: dict[int, int] = {0: ROOT_TOKEN}

    def __len__(self) -> int:
        return len(self._parents)

    def path(self, node: int) -> tuple[int, ...]:
        return tuple(self[step] for step in trees.path_to(self._parents, node))

    def __getitem__(self, node: int) -> int:  # type: ignore[override]
        if node not in self._known:
            parent = self._parents[node]
            earlier = [self[other] for other in range(1, node) if self._parents[other] == parent]
            law = self._draft.law(self.path(parent))
            self._known[node] = draw_child(self._chance, law, self._kind, earlier)
        return self._known[node]


class _LazyLaws(Mapping[int, Law]):
    def __init__(self, tokens: _LazyTokens, draft: Toy, parents: tuple[int, ...], sparse: bool) -> None:
        self._tokens, self._draft, self._sparse = tokens, draft, sparse
        self._expanded = trees.expanded(parents)

    def __getitem__(self, node: int) -> Law:
        if node not in self._expanded:
            raise KeyError(node)
        return as_law(self._draft.law(self._tokens.path(node)), self._sparse)

    def __contains__(self, node: object) -> bool:
        return node in self._expanded

    def __iter__(self) -> Iterator[int]:
        return iter(self._expanded)

    def __len__(self) -> int:
        return len(self._expanded)


def as_law(probs: np.ndarray, sparse: bool = False) -> Law:
    probs_V = torch.from_numpy(probs.copy())
    if not sparse:
        return Law(probs_V)
    # Unsorted on purpose: nothing promises ascending ids.
    ids = probs_V.nonzero().flatten().flip(0)
    return Law(probs_V[ids], ids)


def sampled(
    chance: ScriptedChance, draft: Toy, kind: ProposalKind, parents: tuple[int, ...], sparse: bool = False
) -> Proposal:
    """A proposal of a fixed shape whose tokens are drawn when they are read."""
    tokens = _LazyTokens(chance, draft, kind, parents)
    laws = {} if kind is ProposalKind.POINT_MASS else _LazyLaws(tokens, draft, parents, sparse)
    return Proposal(Tree(tokens, parents), kind, laws)  # type: ignore[arg-type]


Drafting = Callable[[ScriptedChance], Proposal]


def verdicts(drafting: Drafting, target: Toy, sampler: Sampler) -> Iterator[tuple[float, Verdict]]:
    """Every verdict of one step with its probability: drafts and acceptances enumerated together."""

    def run(chance: ScriptedChance) -> Verdict:
        proposal = drafting(chance)
        return decide(proposal, _Rows(proposal.tree, target), sampler, chance)  # type: ignore[arg-type]

    return outcomes(run)


class Joint:
    """The target's own joint law of the first tokens after the root, transforms included."""

    def __init__(self, target: Toy, sampler: Sampler) -> None:
        self._target, self._sampler = target, sampler
        self._laws: dict[tuple[int, ...], np.ndarray] = {}

    def law(self, path: tuple[int, ...]) -> np.ndarray:
        if path not in self._laws:
            self._laws[path] = self._sampler.law(self._target.logits(path), path).numpy()
        return self._laws[path]

    def continued(self, tokens: tuple[int, ...], length: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every sequence of `length` tokens that starts with `tokens`, with its conditional probability."""
        if len(tokens) >= length:
            yield tokens[:length], 1.0
            return
        for token, prob in enumerate(self.law(tokens).tolist()):
            if prob > 0:
                for sequence, rest in self.continued((*tokens, token), length):
                    yield sequence, prob * rest


def bias(drafting: Drafting, target: Toy, sampler: Sampler, length: int = 3) -> float:
    """Total variation between the emitted law, extended with the target to `length`, and the target's."""
    joint = Joint(target, sampler)
    mass: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(target.vocab_size), repeat=length), 0.0)
    for weight, verdict in verdicts(drafting, target, sampler):
        for sequence, prob in joint.continued(verdict.tokens, length):
            mass[sequence] += weight * prob
    for sequence, prob in joint.continued((), length):
        mass[sequence] -= prob
    return 0.5 * sum(abs(difference) for difference in mass.values())


def expected_tokens(drafting: Drafting, target: Toy, sampler: Sampler) -> float:
    """Mean number of tokens a step emits."""
    return sum(weight * verdict.num_emitted for weight, verdict in verdicts(drafting, target, sampler))


def draft_keyed(
    draft: Toy, random: RequestRandom, kind: ProposalKind, parents: tuple[int, ...], emitted: tuple[int, ...]
) -> Proposal:
    """A proposal drawn as a model drafter draws it: real draw functions, the request's keyed noise."""
    position, vocab_size = len(emitted), draft.vocab_size
    below = trees.children(parents)
    tokens: dict[int, int] = {0: emitted[-1] if emitted else ROOT_TOKEN}
    laws: dict[int, Law] = {}
    for node in trees.expanded(parents):
        path = (*emitted, *(tokens[step] for step in trees.path_to(parents, node)))
        law = draft.recorded(path)
        if kind is ProposalKind.IID:
            drawn = draw.draw_iid(law, random, position, below[node], vocab_size)
        else:
            drawn = draw.draw_without_replacement(law, random, position, node, len(below[node]), vocab_size)
        laws[node] = law
        tokens.update(zip(below[node], drawn, strict=True))
    return Proposal(Tree(tuple(tokens[node] for node in range(len(parents))), parents), kind, laws)


def draft_coupled(draft: Toy, random: RequestRandom, parents: tuple[int, ...], emitted: tuple[int, ...]) -> Proposal:
    """A proposal drawn from the target's own noise: point masses for seeded coupling."""
    below = trees.children(parents)
    tokens: dict[int, int] = {0: emitted[-1] if emitted else ROOT_TOKEN}
    for node in trees.expanded(parents):
        path = (*emitted, *(tokens[step] for step in trees.path_to(parents, node)))
        drawn = draw.draw_coupled(draft.logits(path), random, len(path), len(below[node]))
        tokens.update(zip(below[node], drawn, strict=True))
    return Proposal(Tree(tuple(tokens[node] for node in range(len(parents))), parents))


KeyedDrafting = Callable[[RequestRandom, tuple[int, ...]], Proposal]


def generate(
    target: Toy, sampler: Sampler, random: RequestRandom, length: int, drafting: KeyedDrafting | None = None
) -> tuple[int, ...]:
    """The first `length` tokens as an engine would emit them, step by step, through `verify`."""
    emitted: tuple[int, ...] = ()
    while len(emitted) < length:
        root = emitted[-1] if emitted else ROOT_TOKEN
        proposal = drafting(random, emitted) if drafting else Proposal.empty(root)
        verdict = verify(proposal, score(proposal.tree, target, emitted), sampler, random, len(emitted))
        sampler.append(verdict.tokens)
        emitted += verdict.tokens
    return emitted[:length]
