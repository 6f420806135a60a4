"""What the verification rules ask of chance, and two ways to answer.

The rules of `core.verify_rules` never touch noise: they ask "accept this node with probability a/b?" and
"emit one token of these weights". `KeyedChance` answers from the request's noise (verification proper);
`ScriptedChance` follows a script, so that `outcomes` walks through every possible run with its
probability. One implementation of each rule, therefore, both runs and is enumerated exactly.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from draftsmith.core.random import RequestRandom
from draftsmith.core.sampling import Sampler

Vector: TypeAlias = npt.NDArray[np.float64]
"""Weights over the vocabulary, [V]."""
Result = TypeVar("Result")


class Chance(ABC):
    """Answers the random questions of one verification."""

    @abstractmethod
    def target_token(self, sampler: Sampler, logits_V: torch.Tensor, path: Sequence[int]) -> int:
        """The target's own token at the output position `len(path)` after the root's."""

    @abstractmethod
    def accept(self, node: int, numerator: float, denominator: float) -> bool:
        """True with probability min(1, numerator / denominator); never when the numerator is 0."""

    @abstractmethod
    def emit(self, node: int, weights_V: Vector) -> int:
        """One token drawn with probabilities proportional to `weights_V`, emitted below `node`."""


class KeyedChance(Chance):
    """Answers from a request's keyed noise. `position`: output position of the root's row."""

    __slots__ = ("_position", "_random")

    def __init__(self, random: RequestRandom, position: int) -> None:
        self._random = random
        self._position = position

    def target_token(self, sampler: Sampler, logits_V: torch.Tensor, path: Sequence[int]) -> int:
        return sampler.sample(logits_V, self._random.target_noise(self._position + len(path)), path)

    def accept(self, node: int, numerator: float, denominator: float) -> bool:
        # Strict, and a product: no division by a tiny probability, and a numerator of 0 is never accepted.
        return self._random.accept_uniform(self._position, node) * denominator < numerator

    def emit(self, node: int, weights_V: Vector) -> int:
        noise_V = self._random.residual_gumbel(self._position, node, len(weights_V))
        return gumbel_argmax(weights_V, noise_V)


class ScriptedChance(Chance):
    """Answers from a script of choices, then always with the first possible choice.

    `weight`: probability of all choices made so far. `untaken`: scripts of the runs that branch off after
    the given script ended.
    """

    __slots__ = ("_choices", "_script", "untaken", "weight")

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self._script = script
        self._choices: list[int] = []
        self.weight = 1.0
        self.untaken: list[tuple[int, ...]] = []

    def target_token(self, sampler: Sampler, logits_V: torch.Tensor, path: Sequence[int]) -> int:
        return self.pick(sampler.law(logits_V, path).tolist())

    def accept(self, node: int, numerator: float, denominator: float) -> bool:
        probability = 0.0 if numerator <= 0 else 1.0 if numerator >= denominator else numerator / denominator
        return self.pick((1.0 - probability, probability)) == 1

    def emit(self, node: int, weights_V: Vector) -> int:
        return self.pick((weights_V / weights_V.sum()).tolist())

    def pick(self, probs: Sequence[float]) -> int:
        """One index, drawn with the given probabilities (they sum to 1)."""
        depth = len(self._choices)
        if depth < len(self._script):
            choice = self._script[depth]
        else:
            choice, *others = [index for index, prob in enumerate(probs) if prob > 0]
            self.untaken += [(*self._choices, other) for other in others]
        self._choices.append(choice)
        self.weight *= probs[choice]
        return choice


def outcomes(run: Callable[[ScriptedChance], Result]) -> Iterator[tuple[float, Result]]:
    """Every possible result of `run` with its probability, one entry per sequence of choices.

    `run` must depend on nothing random but the `ScriptedChance` it is given; it is called once per entry.
    """
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = ScriptedChance(scripts.pop())
        result = run(chance)
        yield chance.weight, result
        scripts += chance.untaken


def gumbel_argmax(weights_V: Vector, noise_V: Vector) -> int:
    """argmax of log weight + noise over the positive weights, the lowest id among equals."""
    has_mass_V = weights_V > 0
    if np.count_nonzero(has_mass_V) * 2 > len(weights_V):
        with np.errstate(divide="ignore"):
            return int((np.log(weights_V) + noise_V).argmax())
    support = np.flatnonzero(has_mass_V)
    return int(support[(np.log(weights_V[support]) + noise_V[support]).argmax()])
