"""Losses that teach a draft law q to accept like the target law p, and what a training step reports.

Called by trainable drafters and the trainer; no model is known here. Sources: DistillSpec (2310.08461) for the
divergences, LK losses (2602.23881) for `nla` and `lk_hybrid`, D-PACE (2605.18810) for path weights.
Invariant: everything is computed in float32 (float64 for float64 inputs) whatever the inputs are, no
gradient reaches the target, and a masked row, even one full of NaN, adds nothing to value or gradient.

Shape letters: N rows (training positions), V vocabulary, K draft depths.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from draftsmith.errors import OptionError

LossFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(draft log-probabilities [N, V], target log-probabilities [N, V]) -> loss of each row [N]."""

# Stands for log 0 of a token that one law excludes: dear, but finite. Never replaces a finite value.
_LOG_NOTHING = -70.0


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax in at least float32; excluded tokens (minus infinity) get -70 and no gradient."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = torch.log_softmax(wide, dim=-1)
    return log_probs.masked_fill(log_probs == -torch.inf, _LOG_NOTHING)


def kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Forward KL(p, q): covers everything the target may say. The default."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def reverse_kl(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """KL(q, p): concentrates on what the target says most."""
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1)


def jsd(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence, symmetric and at most log 2."""
    log_mean = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=log_q.dtype, device=log_q.device))
    return 0.5 * (log_p.exp() * (log_p - log_mean) + log_q.exp() * (log_q - log_mean)).sum(dim=-1)


def ce(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Cross-entropy against the target's argmax."""
    return -log_q.gather(-1, log_p.argmax(dim=-1, keepdim=True)).squeeze(-1)


def overlap(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """a = Σ min(p, q): the probability that a drafted token survives chain rejection."""
    return torch.minimum(log_p, log_q).exp().sum(dim=-1)


def tv(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Total variation, 1 - a: the rejection probability itself; its gradient vanishes where a is near 0."""
    return 1 - overlap(log_q, log_p)


def nla(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """-log a: the gradient of `tv` over a, hence alive from a cold start; cross-entropy if p is a point mass."""
    return -torch.logsumexp(torch.minimum(log_p, log_q), dim=-1)


def lk_hybrid(log_q: torch.Tensor, log_p: torch.Tensor, eta: float = 3.0) -> torch.Tensor:
    """w KL + (1 - w) TV with w = exp(-eta a), a without gradient: KL while far, acceptance itself when near.

    `eta` 3 is the paper's; 10 has been used for Medusa heads.
    """
    weight = torch.exp(-eta * overlap(log_q, log_p).detach())
    return weight * kl(log_q, log_p) + (1 - weight) * tv(log_q, log_p)


LOSSES: Mapping[str, LossFunction] = types.MappingProxyType(
    {"kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "ce": ce, "tv": tv, "nla": nla, "lk_hybrid": lk_hybrid}
)


def loss_named(name: str) -> LossFunction:
    """The loss of that name. Raises `OptionError` listing the known ones."""
    if name not in LOSSES:
        raise OptionError(f"unknown loss {name!r}; known are {', '.join(LOSSES)}")
    return LOSSES[name]


def geometric_weights(num_depths: int, base: float) -> tuple[float, ...]:
    """base^k for depths k = 0 ..: 0.8 for Medusa and EAGLE-3, exp(-1 / gamma) for DFlash, 1 for none.

    Raises `OptionError` for a base outside (0, 1].
    """
    if not 0 < base <= 1:
        raise OptionError(f"weight base is {base}; allowed: above 0 and up to 1")
    return tuple(base**depth for depth in range(num_depths))


def path_weights(label_probs_NK: torch.Tensor, smoothing: float = 0.5) -> torch.Tensor:
    """D-PACE: how many accepted tokens hang on each depth, [N, K], without gradient.

    `label_probs_NK`: draft probability of the right token at each depth. With
    c_i = (1 - smoothing) * prob_i + smoothing, w_j = Σ_{m>=j} Π_{i<=m} c_i.
    """
    chances_NK = (1 - smoothing) * label_probs_NK.detach() + smoothing
    alive_NK = chances_NK.cumprod(dim=-1)
    return alive_NK.flip(-1).cumsum(dim=-1).flip(-1)


@dataclass(frozen=True, kw_only=True)
class DepthLoss:
    """One depth (or head) of a training batch: scalars, of which only `loss` carries a gradient.

    `loss`: weighted mean over the `rows` unmasked rows. `accuracy`: share of rows whose draft argmax is the
    target's. `overlap`: mean a. All are 0 when every row is masked.
    """

    loss: torch.Tensor
    accuracy: torch.Tensor
    overlap: torch.Tensor
    rows: torch.Tensor


def depth_loss(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    mask: torch.Tensor,
    loss: LossFunction = kl,
    row_weights: torch.Tensor | None = None,
) -> DepthLoss:
    """The loss of one depth.

    `draft_logits`, `target_logits`: [..., V] over the same vocabulary. `mask` [...], bool: rows that count.
    `row_weights` [...]: factor of each row (see `path_weights`); the mean is over rows, not over weights.
    """
    # Gathering before any arithmetic: 0 * NaN of a padded row would poison the gradient.
    log_q_NV = log_probabilities(draft_logits[mask])
    log_p_NV = log_probabilities(target_logits.detach()[mask])
    losses_N = loss(log_q_NV, log_p_NV)
    if row_weights is not None:
        losses_N = losses_N * row_weights[mask].to(losses_N.dtype)
    rows = mask.sum()
    divisor = rows.clamp_min(1)
    with torch.no_grad():
        hits = (log_q_NV.argmax(dim=-1) == log_p_NV.argmax(dim=-1)).sum() / divisor
        shared = overlap(log_q_NV, log_p_NV).sum() / divisor
    return DepthLoss(loss=losses_N.sum() / divisor, accuracy=hits, overlap=shared, rows=rows)


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """What a drafter's `loss` returns for a batch. `loss`: scalar with gradient; the others [K], without."""

    loss: torch.Tensor
    accuracy: torch.Tensor
    overlap: torch.Tensor
    rows: torch.Tensor

    @property
    def tokens_per_step(self) -> torch.Tensor:
        """Simulated tokens per step, 1 + Σ_k Π_{j<=k} a_j, from the mean overlap of each depth.

        A forecast for chain rejection on the training text, not a measured figure.
        """
        return 1 + self.overlap.cumprod(dim=0).sum()


def report(depths: Sequence[DepthLoss], weights: Sequence[float] | None = None) -> LossReport:
    """Add up the depths, each times its weight (all 1 by default; see `geometric_weights`)."""
    factors = [1.0] * len(depths) if weights is None else list(weights)
    if not depths or len(factors) != len(depths):
        raise OptionError(
            f"{len(depths)} depths and {len(factors)} weights; needed: one weight for each of at least one"
        )
    return LossReport(
        loss=torch.stack([factor * depth.loss for factor, depth in zip(factors, depths, strict=True)]).sum(),
        accuracy=torch.stack([depth.accuracy for depth in depths]),
        overlap=torch.stack([depth.overlap for depth in depths]),
        rows=torch.stack([depth.rows for depth in depths]),
    )
