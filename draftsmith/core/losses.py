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
from typing import Any, NamedTuple, TypeAlias

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


_CHUNK = 32
"""Rows worked on at a time: with a vocabulary of some thousands they stay in a core's cache."""


class _Rows(NamedTuple):
    """What some rows give: loss, hit, overlap [N], and the gradient of their losses [N, V] or None."""

    losses: torch.Tensor
    hits: torch.Tensor
    shared: torch.Tensor
    gradient: torch.Tensor | None


def _rows_of(logits: torch.Tensor, log_p: torch.Tensor, loss: LossFunction, needed: bool) -> _Rows:
    if loss is kl and logits.numel() and bool(torch.isfinite(logits.amin())):
        return _rows_of_kl(logits, log_p, needed)
    with torch.enable_grad():
        logits = logits.detach().requires_grad_(needed)
        log_q = log_probabilities(logits)
        losses = loss(log_q, log_p)
        gradient = torch.autograd.grad(losses.sum(), logits)[0] if needed else None
    log_q = log_q.detach()
    return _Rows(losses.detach(), _hits(log_q, log_p), overlap(log_q, log_p), gradient)


def _rows_of_kl(logits: torch.Tensor, log_p: torch.Tensor, needed: bool) -> _Rows:
    """`kl` where no logit is minus infinity: its gradient is q - p, in half the passes over memory."""
    log_q, p = torch.log_softmax(logits, dim=-1), log_p.exp()
    q = log_q.exp()
    losses = torch.linalg.vecdot(p, log_p - log_q)
    shared = torch.minimum(p, q).sum(dim=-1)
    return _Rows(losses, _hits(log_q, log_p), shared, q.sub_(p) if needed else None)


def _hits(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Whether the likeliest token of one law is the other's, 1 or 0; by value, for finding places is slow."""
    of_best = log_q.masked_fill(log_p != log_p.amax(dim=-1, keepdim=True), -torch.inf).amax(dim=-1)
    return (of_best == log_q.amax(dim=-1)).to(log_p.dtype)


class _RowLosses(torch.autograd.Function):
    """Loss, hit and overlap of each row, a few rows at a time; the gradient is made on the way.

    Equal to applying the loss to all rows at once, without float32 copies of [N, V] in memory: what is kept
    for the backward pass is one gradient in the type of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, draft_logits_NV: torch.Tensor, log_p_RV: torch.Tensor, law_of_N: torch.Tensor, loss: LossFunction
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`law_of_N`: the row of `log_p_RV` that judges each row, -1 for rows that do not count."""
        wide = torch.float64 if torch.float64 in (draft_logits_NV.dtype, log_p_RV.dtype) else torch.float32
        needed = ctx.needs_input_grad[0]
        losses_N = torch.zeros(len(draft_logits_NV), dtype=wide, device=draft_logits_NV.device)
        hits_N, shared_N = torch.zeros_like(losses_N), torch.zeros_like(losses_N)
        gradient_NV = torch.empty_like(draft_logits_NV) if needed else None
        if gradient_NV is not None:
            gradient_NV[law_of_N < 0] = 0
        with torch.autocast(draft_logits_NV.device.type, enabled=False):
            for rows in torch.split((law_of_N >= 0).nonzero().squeeze(-1), _CHUNK):
                log_p = log_p_RV.index_select(0, law_of_N[rows]).to(wide)
                logits = draft_logits_NV.index_select(0, rows).to(wide)
                found = _rows_of(logits, log_p, loss, needed)
                losses_N[rows], hits_N[rows], shared_N[rows] = found.losses, found.hits, found.shared
                if gradient_NV is not None and found.gradient is not None:
                    gradient_NV.index_copy_(0, rows, found.gradient.to(gradient_NV.dtype))
        ctx.save_for_backward(gradient_NV)
        ctx.mark_non_differentiable(hits_N, shared_N)
        return losses_N, hits_N, shared_N

    @staticmethod
    def backward(ctx: Any, *from_above: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        return gradient_NV * from_above[0].unsqueeze(-1).to(gradient_NV.dtype), None, None, None


def judged_loss(
    draft_logits_NV: torch.Tensor,
    log_p_RV: torch.Tensor,
    law_of_N: torch.Tensor,
    loss: LossFunction = kl,
    row_weights_N: torch.Tensor | None = None,
) -> DepthLoss:
    """The loss of one depth against laws that several depths share.

    `log_p_RV`: target log-probabilities (see `log_probabilities`); `law_of_N`: int64, which of them judges each draft
    row, -1 for a row that does not count. `row_weights_N`: factor of each row (see `path_weights`); the mean is
    over rows, not over weights.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _RowLosses.apply
    losses_N, hits_N, shared_N = apply(draft_logits_NV, log_p_RV.detach(), law_of_N, loss)
    if row_weights_N is not None:
        losses_N = losses_N * torch.where(law_of_N >= 0, row_weights_N, 0).to(losses_N.dtype)
    rows = (law_of_N >= 0).sum()
    divisor = rows.clamp_min(1)
    return DepthLoss(
        loss=losses_N.sum() / divisor, accuracy=hits_N.sum() / divisor, overlap=shared_N.sum() / divisor, rows=rows
    )


Judge: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(numbers of draft rows, int64 [n]) -> the target's log-probabilities [n, V] that judge them."""

_BLOCK = 256
"""Rows whose logits are in memory at once when they are made from hidden states: 50 MB of 49,152 tokens."""


class _HeadLosses(torch.autograd.Function):
    """Sums over rows of loss, hits and overlap, from hidden states and the matrix that makes logits of them.

    The gradients to both are made on the way, block by block, so neither logits nor laws [N, V] ever exist whole.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, head_VD: torch.Tensor, judge: Judge, loss: LossFunction, cap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`cap`: the draft's soft cap on logits, None for none."""
        to_hidden, to_head = ctx.needs_input_grad[:2]
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        gradient_ND = torch.zeros_like(hidden_ND) if to_hidden else None
        gradient_VD = torch.zeros_like(head_VD) if to_head else None
        sums = torch.zeros(3, dtype=wide, device=hidden_ND.device)
        for rows in torch.split(torch.arange(len(hidden_ND), device=hidden_ND.device), _BLOCK):
            hidden_BD = hidden_ND[rows]
            logits_BV = (hidden_BD @ head_VD.t()).to(wide)
            if cap is not None:
                logits_BV = cap * torch.tanh(logits_BV / cap)
            gradient_BV = torch.empty_like(logits_BV) if to_hidden or to_head else None
            with torch.autocast(hidden_ND.device.type, enabled=False):
                log_p_BV = judge(rows).to(wide)
                for start in range(0, len(rows), _CHUNK):
                    part = slice(start, start + _CHUNK)
                    found = _rows_of(logits_BV[part], log_p_BV[part], loss, gradient_BV is not None)
                    sums += torch.stack((found.losses.sum(), found.hits.sum(), found.shared.sum()))
                    if gradient_BV is not None and found.gradient is not None:
                        gradient_BV[part] = found.gradient
            if gradient_BV is not None and cap is not None:
                gradient_BV *= 1 - (logits_BV / cap).square()
            if gradient_ND is not None and gradient_BV is not None:
                gradient_ND[rows] = (gradient_BV.to(head_VD.dtype) @ head_VD).to(gradient_ND.dtype)
            if gradient_VD is not None and gradient_BV is not None:
                gradient_VD += gradient_BV.to(hidden_BD.dtype).t() @ hidden_BD
        ctx.save_for_backward(gradient_ND, gradient_VD)
        losses, hits, shared = (item.clone() for item in sums)
        ctx.mark_non_differentiable(hits, shared)
        return losses, hits, shared

    @staticmethod
    def backward(ctx: Any, *from_above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        to_hidden, to_head = (
            None if gradient is None else gradient * from_above[0].to(gradient.dtype) for gradient in ctx.saved_tensors
        )
        return to_hidden, to_head, None, None, None


def head_loss(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    judge: Judge,
    loss: LossFunction = kl,
    cap: float | None = None,
) -> DepthLoss:
    """`judged_loss` for drafts whose logits over a whole vocabulary would be too large to keep.

    Logits of a row are `hidden_ND @ head_VD.t()`, under the soft cap `cap` if there is one; every row counts.
    """
    apply: Callable[..., tuple[torch.Tensor, ...]] = _HeadLosses.apply
    losses, hits, shared = apply(hidden_ND, head_VD, judge, loss, cap)
    rows = torch.tensor(len(hidden_ND), device=hidden_ND.device)
    divisor = rows.clamp_min(1)
    return DepthLoss(loss=losses / divisor, accuracy=hits / divisor, overlap=shared / divisor, rows=rows)


def label_loss(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of what was really said, a scalar; label -1 is left out, and 0 is the mean of nothing."""
    counted = labels_N >= 0
    log_q_NV = log_probabilities(logits_NV[counted])
    return -log_q_NV.gather(-1, labels_N[counted, None]).sum() / counted.sum().clamp_min(1)


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
    counted = mask.flatten()
    # Gathering before any arithmetic: 0 * NaN of a padded row would poison the gradient.
    log_p_RV = log_probabilities(target_logits.detach().flatten(0, -2)[counted])
    law_of_N = torch.where(counted, counted.cumsum(0) - 1, -1)
    weights_N = None if row_weights is None else row_weights.flatten()
    return judged_loss(draft_logits.flatten(0, -2), log_p_RV, law_of_N, loss, weights_N)


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
