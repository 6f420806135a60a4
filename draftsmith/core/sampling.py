"""The one place where logits become the target's law, and where a token is taken from it.

Called by verification, drafters and the engine through a `Sampler`, which is bound to one sequence.
Order of transforms: repetition penalty, presence and frequency penalty, logit bias, banned ids and
min_tokens mask, [greedy: argmax], temperature, top-k, top-p, min-p, renormalise.
Invariant: a row's result depends on that row, the history and its own drafted path alone; a row seen
through `path` equals, bit for bit, the same row after `append(path)`.

Shape letters: V vocabulary, C tokens of a support.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from draftsmith.core import accelerator
from draftsmith.core.inexact import InexactRule
from draftsmith.core.penalties import Penalties
from draftsmith.core.random import KeyedNoise
from draftsmith.core.truncation import Ids, Row, argmax, support
from draftsmith.core.types import Rule
from draftsmith.errors import DraftsmithError, OptionError, PromptError

_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request turns logits into tokens. Raises `OptionError`, one line per fault.

    `temperature`: 0 is greedy, else at least 1e-6. `top_k`: 0 is off. `top_p` in (0, 1], 1 is off.
    `min_p` in [0, 1), relative to the most probable token, 0 is off. `repetition_penalty` > 0 divides
    positive and multiplies negative logits of every token in prompt or output. `presence_penalty` and
    `frequency_penalty` in [-2, 2] (the range of OpenAI's API) are subtracted once per token id seen, or
    once per occurrence, in the output alone. `logit_bias` is added; minus infinity bans. `banned_ids`
    are never emitted; end ids are not emitted before `min_tokens` tokens have been.
    `rule`: verification rule; a `Rule` matters at temperature > 0 and does not change the law, an
    `InexactRule` changes what is written.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    rule: Rule | InexactRule = Rule.COUPLING

    def __post_init__(self) -> None:
        _real(
            "temperature",
            self.temperature,
            lambda t: t == 0 or t >= _MIN_TEMPERATURE,
            f"0 (greedy) or at least {_MIN_TEMPERATURE}",
        )
        _whole("top_k", self.top_k, "a whole number of at least 0 (0 = off)")
        _real("top_p", self.top_p, lambda p: 0 < p <= 1, "above 0 and up to 1 (1 = off)")
        _real("min_p", self.min_p, lambda p: 0 <= p < 1, "at least 0 (0 = off) and below 1")
        _real("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "above 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _real(name, getattr(self, name), lambda p: -2 <= p <= 2, "from -2 to 2 (0 = off)")
        _whole("min_tokens", self.min_tokens, "a whole number of at least 0")
        if isinstance(self.rule, InexactRule):
            self.rule.check_temperature(self.temperature)
        elif not isinstance(self.rule, Rule):
            raise OptionError(
                f"rule is {self.rule!r}; allowed: {', '.join(rule.value for rule in Rule)}, or a lossy rule"
            )
        # Own copies: a caller changing its dict later must not change a running request.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "banned_ids", frozenset(self.banned_ids))
        for token, bias in self.logit_bias.items():
            _whole("logit_bias key", token, "a token id")
            if not isinstance(bias, numbers.Real) or math.isnan(bias) or bias == math.inf:
                raise OptionError(f"logit_bias of token {token} is {bias!r}; allowed: a finite number, or -inf to ban")
        for token in self.banned_ids:
            _whole("banned_ids", token, "token ids")

    @property
    def draft_rule(self) -> Rule:
        """The lossless rule that drafters draw for."""
        return self.rule.drafts_as if isinstance(self.rule, InexactRule) else self.rule

    @property
    def penalises(self) -> bool:
        """Whether a transform looks at the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _real(name: str, value: float, is_allowed: Callable[[float], bool], allowed: str) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not is_allowed(value):
        raise OptionError(f"{name} is {value!r}; allowed: {allowed}")


def _whole(name: str, value: int, allowed: str) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise OptionError(f"{name} is {value!r}; allowed: {allowed}")


class Sampler:
    """The sampling transforms of one request, bound to one sequence's history.

    Rows are logits [V] in float32 or float64 (other types are widened to float32), on any device; work
    is done on the CPU and tensors come back on the row's device. `path` holds the drafted tokens between
    the root (exclusive) and the row's node (inclusive).

    Support: top-k keeps exactly k tokens and top-p the smallest set whose mass reaches `top_p`, both by
    descending probability, ties by ascending id, never fewer than one token. The mass is summed in the
    row's own precision, so a float32 row decides top-p up to about 1e-7.

    A row with everything masked falls back to its raw logits (no transform before the temperature), and
    one that is minus infinity throughout to the uniform law. NaN or plus infinity in a row raises
    `DraftsmithError`: the model is broken.
    """

    __slots__ = (
        "_banned",
        "_bias_ids",
        "_biases",
        "_end_ids",
        "_history",
        "_inverse_temperature",
        "_num_output",
        "_raw",
        "_vocab_size",
        "context_free",
        "greedy",
        "params",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: Sequence[int],
        end_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        """`vocab_size`: length of a logits row. Raises `OptionError` and `PromptError` for ids outside it."""
        for name, ids in (("logit_bias", params.logit_bias), ("banned_ids", params.banned_ids)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise OptionError(
                    f"{name} names token {outside[0]}; allowed: ids below {vocab_size}, the vocabulary size"
                )
        if len(params.banned_ids) >= vocab_size:
            raise OptionError("banned_ids names every token of the vocabulary; leave at least one")
        self.params = params
        self.greedy: bool = params.temperature == 0
        self._inverse_temperature = 1.0 if self.greedy else 1.0 / params.temperature
        self._vocab_size = vocab_size
        self._num_output = 0
        self._history: Penalties | None = None
        if params.penalises:
            if len(prompt_tokens) and not 0 <= min(prompt_tokens) <= max(prompt_tokens) < vocab_size:
                raise PromptError(f"the prompt holds token ids outside the vocabulary of {vocab_size}")
            weights = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            self._history = Penalties(*weights, prompt_tokens)
        self._bias_ids = np.array(sorted(params.logit_bias), dtype=np.int64)
        self._biases = np.array([params.logit_bias[token] for token in self._bias_ids.tolist()], dtype=np.float64)
        self._banned = np.array(sorted(params.banned_ids), dtype=np.int64)
        # End ids beyond the logits (a tokenizer larger than the head) can never be emitted.
        ends = sorted(token for token in end_ids if token < vocab_size) if params.min_tokens else []
        self._end_ids = np.array(ends, dtype=np.int64)
        self.context_free: bool = not (params.penalises or params.logit_bias or params.banned_ids or ends)
        """No transform before the temperature: the greedy token is the plain argmax of the row."""
        self._raw: bool = params.top_k == 0 and params.top_p == 1 and params.min_p == 0

    def append(self, tokens: Sequence[int]) -> None:
        """Emitted tokens join the history."""
        self._num_output += len(tokens)
        if self._history is not None:
            self._history.append(tokens)

    def fork(self) -> Sampler:
        """An independent sampler with the same history."""
        twin = Sampler.__new__(Sampler)
        for name in Sampler.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._history = self._history.copy() if self._history is not None else None
        return twin

    def narrowed(self, size: int) -> Sampler:
        """For rows of a part of the vocabulary; of a request whose transforms name no token (`context_free`)."""
        assert self.context_free, "transforms that name tokens need the whole vocabulary"
        twin = self.fork()
        twin._vocab_size = size
        return twin

    def scores(self, logits_V: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """The log-law up to a constant, float64 [V], minus infinity outside the support."""
        row_V, best = self._adjusted(logits_V, path)
        if self._raw and not self.greedy:
            return torch.from_numpy(self._tempered(row_V)).to(logits_V.device)
        ids, values = self._support(row_V, best)
        scores_V = np.full(self._vocab_size, -np.inf)
        scores_V[ids] = self._tempered(values)
        return torch.from_numpy(scores_V).to(logits_V.device)

    def law(self, logits_V: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """The normalised law, float64 [V]; at temperature 0 all mass lies on the argmax."""
        row_V, best = self._adjusted(logits_V, path)
        if self._raw and not self.greedy:
            return torch.from_numpy(_softmax(self._tempered(row_V))).to(logits_V.device)
        ids, values = self._support(row_V, best)
        probs_V = np.zeros(self._vocab_size)
        probs_V[ids] = _softmax(self._tempered(values))
        return torch.from_numpy(probs_V).to(logits_V.device)

    def argmax(self, logits_V: torch.Tensor, path: Sequence[int] = ()) -> int:
        """The greedy token: largest logit after penalties, bias and masks; the lowest id among equals."""
        return self._adjusted(logits_V, path)[1]

    def adjusted(self, logits_V: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """The logits after every transform before the temperature, float64 [V]; minus infinity where masked."""
        return torch.from_numpy(self._adjusted(logits_V, path)[0].astype(np.float64)).to(logits_V.device)

    def allows(self, token: int, path: Sequence[int] = ()) -> bool:
        """Whether banned ids, biases and min_tokens leave a token any chance after `path`."""
        params = self.params
        if token in params.banned_ids or params.logit_bias.get(token) == -math.inf:
            return False
        return self._num_output + len(path) >= params.min_tokens or token not in self._end_ids

    def sample(
        self, logits_V: torch.Tensor, noise: KeyedNoise | npt.NDArray[np.float64], path: Sequence[int] = ()
    ) -> int:
        """argmax of `scores + noise`, the lowest id among equals; with Gumbel noise [V] a draw from the law.

        Bit for bit the same as evaluating it over the whole row; keyed noise may be looked at in fewer places, and
        so takes less time. At temperature 0 the noise is ignored.
        """
        row_V, best = self._adjusted(logits_V, path)
        if self.greedy:
            return best
        if isinstance(noise, KeyedNoise):
            return self._sample_keyed(row_V, best, noise)
        ids, values = self._contenders(row_V, best, noise) if self._raw else self._support(row_V, best)
        if ids is None:
            scores_V = self._tempered(row_V)
            scores_V += noise
            return int(scores_V.argmax())
        return int(ids[(self._tempered(values) + noise[ids]).argmax()])

    def _sample_keyed(self, row_V: Row, best: int, noise: KeyedNoise) -> int:
        native = accelerator.native()
        if native is not None:
            found: int = native.sample(row_V, best, *self._rules(row_V, best), *noise.words)
            return found
        if self._raw:
            return noise.argmax(self._tempered(row_V))
        ids, values = self._support(row_V, best)
        return int(ids[noise.argmax(self._tempered(values), ids)])

    def _tempered(self, values: Row) -> npt.NDArray[np.float64]:
        scores = values.astype(np.float64)
        if self._inverse_temperature != 1:
            scores *= self._inverse_temperature
        return scores

    def _adjusted(self, logits_V: torch.Tensor, path: Sequence[int]) -> tuple[Row, int]:
        """The row after every transform before the temperature, and its argmax; the maximum is finite."""
        raw_V = _as_numpy(logits_V)
        assert raw_V.shape == (self._vocab_size,), (
            f"a logits row of shape {raw_V.shape}, expected ({self._vocab_size},)"
        )
        row_V = raw_V if self.context_free else self._transformed(raw_V, path)
        best = argmax(row_V)  # finds a NaN if there is one
        if -np.inf < row_V[best] < np.inf:
            return row_V, best
        if np.isnan(raw_V).any() or np.isposinf(raw_V).any():
            raise DraftsmithError("the model's logits hold NaN or +inf; its weights or its numerics are broken")
        row_V = raw_V if np.isfinite(raw_V).any() else np.zeros_like(raw_V)
        return row_V, argmax(row_V)

    def _transformed(self, raw_V: Row, path: Sequence[int]) -> Row:
        row_V = raw_V.copy()
        if self._history is not None:
            self._history.apply(row_V, raw_V, path)
        if len(self._bias_ids):
            row_V[self._bias_ids] += self._biases.astype(row_V.dtype)
        row_V[self._banned] = -np.inf
        if self._num_output + len(path) < self.params.min_tokens:
            row_V[self._end_ids] = -np.inf
        return row_V

    def _support(self, row_V: Row, best: int) -> tuple[Ids, Row]:
        """The tokens that survive truncation (ids ascending) and their logits; `best` is the row's argmax."""
        if self.greedy:
            return np.array([best], dtype=np.int64), row_V[best : best + 1]
        ids = support(row_V, best, *self._rules(row_V, best))
        return ids, row_V[ids]

    @property
    def truncation(self) -> tuple[float, int, float, float]:
        """Inverse temperature, k (0: off), p (1: off), and how far below the largest logit min-p goes, at most 0."""
        params = self.params
        # p >= min_p * p_max, on logits.
        reach = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        return self._inverse_temperature, params.top_k, params.top_p, reach

    def _rules(self, row_V: Row, best: int) -> tuple[float, int, float, float]:
        """`truncation` of a row: the lowest logit that min-p leaves comes last."""
        inverse_temperature, top_k, top_p, reach = self.truncation
        return inverse_temperature, top_k, top_p, float(row_V[best]) + reach

    def _contenders(self, row_V: Row, best: int, noise_V: npt.NDArray[np.float64]) -> tuple[Ids | None, Row]:
        """The tokens that can still win against the better of two good guesses; None if that is too many.

        Rounding is monotone, so a token whose score plus the largest noise stays below a score already
        reached loses in floating point too; the slack covers the comparison in the row's precision.
        """
        loudest = int(noise_V.argmax())
        most = float(noise_V[loudest])
        reached = max(float(row_V[i]) * self._inverse_temperature + float(noise_V[i]) for i in (best, loudest))
        slack = 1e-5 * (abs(reached) + abs(most) + 1)
        mask_V = row_V >= row_V.dtype.type((reached - most - slack) * self.params.temperature)
        if np.count_nonzero(mask_V) * 8 > len(row_V):
            return None, row_V
        ids = np.flatnonzero(mask_V)
        return ids, row_V[ids]


def _as_numpy(logits_V: torch.Tensor) -> Row:
    row_V = logits_V.detach()
    if row_V.dtype not in (torch.float32, torch.float64):
        row_V = row_V.float()
    array: Row = np.ascontiguousarray(row_V.cpu().numpy())
    return array


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights
