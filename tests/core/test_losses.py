"""Losses: values against scipy, gradients against the identities they are chosen for, and safety."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import scipy.spatial.distance
import scipy.special
import torch

from draftsmith.core.losses import (
    LOSSES,
    depth_loss,
    geometric_weights,
    head_loss,
    judged_loss,
    kl,
    label_loss,
    lk_hybrid,
    log_probabilities,
    loss_named,
    overlap,
    path_weights,
    report,
)
from draftsmith.core.theory import acceptance, expected_tokens
from draftsmith.errors import OptionError

NAMES = list(LOSSES)


def logits(seed: int, *shape: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def per_row(name: str, draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return LOSSES[name](log_probabilities(draft), log_probabilities(target))


def gradient(name: str, draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    leaf = draft.clone().requires_grad_()
    per_row(name, leaf, target).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_values_against_independent_definitions() -> None:
    draft, target = logits(0, 5, 7), logits(1, 5, 7)
    q, p = torch.softmax(draft, -1).numpy(), torch.softmax(target, -1).numpy()
    shared = np.minimum(p, q).sum(-1)
    weight = np.exp(-3 * shared)
    forward = scipy.special.rel_entr(p, q).sum(-1)
    expected = {
        "kl": forward,
        "reverse_kl": scipy.special.rel_entr(q, p).sum(-1),
        "jsd": scipy.spatial.distance.jensenshannon(p, q, axis=-1) ** 2,
        "ce": -np.log(q[np.arange(5), p.argmax(-1)]),
        "tv": np.abs(p - q).sum(-1) / 2,
        "nla": -np.log(shared),
        "lk_hybrid": weight * forward + (1 - weight) * (1 - shared),
    }
    assert expected.keys() == LOSSES.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(per_row(name, draft, target).numpy(), values, rtol=1e-10, err_msg=name)
    np.testing.assert_allclose(overlap(log_probabilities(draft), log_probabilities(target)).numpy(), shared, rtol=1e-12)
    torch.testing.assert_close(torch.from_numpy(shared), acceptance(torch.from_numpy(p), torch.from_numpy(q)))


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_draft_costs_nothing_and_a_worse_one_more(name: str) -> None:
    target = logits(2, 4, 6)
    near, far = target + 0.1 * logits(3, 4, 6), target + 2 * logits(3, 4, 6)
    least = per_row(name, target, target)
    if name != "ce":  # the entropy-like remainder of cross-entropy stays
        torch.testing.assert_close(least, torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
        assert (per_row(name, near, target) < per_row(name, far, target)).all()
    assert float(per_row(name, far, target).mean()) > float(least.mean())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lk_hybrid"])
def test_gradcheck(name: str) -> None:
    target = logits(4, 3, 5)
    draft = logits(5, 3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda leaf: per_row(name, leaf, target), (draft,))


def test_hybrid_takes_its_weight_without_gradient() -> None:
    """Finite differences see the weight move; the gradient must not."""
    draft, target = logits(6, 4, 6), logits(7, 4, 6)
    for eta, function in ((3.0, lk_hybrid), (10.0, functools.partial(lk_hybrid, eta=10.0))):
        weight = torch.exp(-eta * overlap(log_probabilities(draft), log_probabilities(target)))[:, None]
        leaf = draft.clone().requires_grad_()
        function(log_probabilities(leaf), log_probabilities(target)).sum().backward()
        expected = weight * gradient("kl", draft, target) + (1 - weight) * gradient("tv", draft, target)
        torch.testing.assert_close(leaf.grad, expected)


def test_gradient_of_nla_is_that_of_tv_over_the_overlap() -> None:
    draft, target = logits(8, 6, 9), logits(9, 6, 9)
    shared = overlap(log_probabilities(draft), log_probabilities(target))[:, None]
    torch.testing.assert_close(gradient("nla", draft, target), gradient("tv", draft, target) / shared)


def test_against_a_point_mass_nla_and_kl_are_cross_entropy() -> None:
    draft = logits(10, 4, 6)
    target = torch.full((4, 6), -math.inf, dtype=torch.float64)
    target[torch.arange(4), torch.tensor([0, 3, 5, 2])] = 0
    for name in ("nla", "kl"):
        torch.testing.assert_close(per_row(name, draft, target), per_row("ce", draft, target))
        torch.testing.assert_close(gradient(name, draft, target), gradient("ce", draft, target))


def test_gradients_at_a_cold_start() -> None:
    """Almost disjoint laws: the gradient of tv is gone, that of nla is not, even where a underflows float32."""
    draft = torch.tensor([[0.0, 60.0, 0.0]])
    target = torch.tensor([[60.0, 0.0, 0.0]])
    assert float(gradient("tv", draft, target).abs().max()) < 1e-20
    assert float(gradient("nla", draft, target).abs().max()) > 0.3
    draft, target = draft * 5, target * 5  # a ~ e^-300
    assert math.isfinite(float(per_row("nla", draft, target)))
    assert float(gradient("nla", draft, target).abs().max()) > 0.3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_and_low_precision_logits_stay_finite(name: str, dtype: torch.dtype) -> None:
    rows = [
        ([3e4, -3e4, 0.0, 1.0], [-3e4, 3e4, 0.0, 1.0]),
        ([0.0, -math.inf, 1.0, -math.inf], [1.0, 2.0, -math.inf, -math.inf]),
        ([0.0, 0.0, 0.0, 0.0], [-math.inf, -math.inf, -math.inf, 5.0]),
        ([5.0, 5.0, 5.0, 5.0], [5.0, 5.0, 5.0, 5.0]),
    ]
    draft = torch.tensor([row[0] for row in rows], dtype=dtype).requires_grad_()
    target = torch.tensor([row[1] for row in rows], dtype=dtype)
    values = per_row(name, draft, target)
    assert values.dtype == torch.float32
    values.sum().backward()
    assert torch.isfinite(values).all() and draft.grad is not None and torch.isfinite(draft.grad).all()
    wide = per_row(name, draft.detach().double(), target.double())
    # One sum has terms of 1e4 and more, hence the relative tolerance of float32 sums.
    torch.testing.assert_close(values.double(), wide, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_masked_rows_add_nothing_even_when_they_hold_nan(name: str) -> None:
    draft, target = logits(11, 2, 4, 6), logits(12, 2, 4, 6)
    mask = torch.tensor([[True, False, True, True], [False, True, False, False]])
    clean = depth_loss(draft, target, mask, LOSSES[name])
    assert int(clean.rows) == 4
    torch.testing.assert_close(clean.loss, per_row(name, draft[mask], target[mask]).mean())
    draft, target = draft.masked_fill(~mask[..., None], math.nan), target.masked_fill(~mask[..., None], math.nan)
    draft.requires_grad_()
    poisoned = depth_loss(draft, target, mask, LOSSES[name])
    torch.testing.assert_close(poisoned.loss, clean.loss)
    poisoned.loss.backward()
    assert draft.grad is not None
    assert (draft.grad[~mask] == 0).all() and (draft.grad[mask].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_a_single_row_is_zero_with_zero_gradient(name: str) -> None:
    draft = torch.full((3, 5), math.nan, requires_grad=True)
    nothing = depth_loss(draft, torch.zeros(3, 5), torch.zeros(3, dtype=torch.bool), LOSSES[name])
    whole = report([nothing, nothing], [1.0, 0.8])
    whole.loss.backward()
    assert float(whole.loss.detach()) == 0 and float(whole.tokens_per_step) == 1
    assert draft.grad is not None and (draft.grad == 0).all()


def test_the_target_gets_no_gradient() -> None:
    draft, target = logits(13, 3, 4).requires_grad_(), logits(14, 3, 4).requires_grad_()
    depth_loss(draft, target, torch.ones(3, dtype=torch.bool), kl).loss.backward()
    assert target.grad is None and draft.grad is not None


def test_row_weights_scale_rows_and_the_mean_stays_over_rows() -> None:
    draft, target = logits(15, 3, 4), logits(16, 3, 4)
    mask = torch.tensor([True, True, False])
    weights = torch.tensor([2.0, 0.5, 9.0])
    rows = per_row("kl", draft, target)
    weighted = depth_loss(draft, target, mask, kl, weights)
    torch.testing.assert_close(weighted.loss, (2 * rows[0] + 0.5 * rows[1]) / 2)
    plain = depth_loss(draft, target, mask, kl)
    assert weighted.overlap == plain.overlap and weighted.accuracy == plain.accuracy


def test_report_by_hand() -> None:
    # Depth 0: laws (.5, .5) and (.75, .25): a = .75; second row equal: a = 1. Depth 1: one row, disjoint argmax.
    target = torch.log(torch.tensor([[0.75, 0.25], [0.2, 0.8]], dtype=torch.float64))
    draft = torch.log(torch.tensor([[0.5, 0.5], [0.2, 0.8]], dtype=torch.float64))
    first = depth_loss(draft, target, torch.tensor([True, True]), loss_named("tv"))
    second = depth_loss(draft.flip(-1), target, torch.tensor([False, True]), loss_named("tv"))
    whole = report([first, second], geometric_weights(2, 0.8))
    assert float(whole.loss) == pytest.approx(0.125 + 0.8 * 0.6)
    assert whole.overlap.tolist() == pytest.approx([0.875, 0.4])
    assert whole.accuracy.tolist() == pytest.approx([1.0, 0.0])  # equal probabilities: the lowest id, as the target's
    assert whole.rows.tolist() == [2, 1]
    assert float(whole.tokens_per_step) == pytest.approx(expected_tokens([0.875, 0.4], 2))
    assert not whole.overlap.requires_grad
    assert float(report([first, second]).loss) == pytest.approx(0.125 + 0.6)


def test_geometric_weights() -> None:
    assert geometric_weights(4, 0.8) == pytest.approx((1, 0.8, 0.64, 0.512))
    assert geometric_weights(3, math.exp(-1 / 4)) == pytest.approx([math.exp(-k / 4) for k in range(3)])
    assert geometric_weights(3, 1.0) == (1, 1, 1)


def test_path_weights_count_the_tokens_that_hang_on_a_depth() -> None:
    probs = torch.tensor([[0.9, 0.5, 0.2], [0.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    weights = path_weights(probs, 0.5)
    assert not weights.requires_grad
    for row, found in zip(probs.tolist(), weights.tolist(), strict=True):
        chances = [0.5 * prob + 0.5 for prob in row]
        for depth in range(3):
            expected = sum(math.prod(chances[: end + 1]) for end in range(depth, 3))
            assert found[depth] == pytest.approx(expected)
    # Without smoothing nothing behind a sure failure weighs anything.
    assert path_weights(probs, 0.0)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_training_with_any_loss_raises_the_overlap(name: str) -> None:
    target = logits(17, 8, 12)
    draft = torch.zeros(8, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(8, dtype=torch.bool)
    before = float(depth_loss(draft.detach(), target, mask).overlap)
    optimizer = torch.optim.Adam([draft], lr=0.1)
    for _ in range(60):
        optimizer.zero_grad()
        step = depth_loss(draft, target, mask, LOSSES[name])
        step.loss.backward()
        optimizer.step()
    after = depth_loss(draft.detach(), target, mask)
    assert float(after.accuracy) == 1
    assert float(after.overlap) > (before if name == "ce" else 0.9)


def test_bad_names_and_weights_are_refused() -> None:
    with pytest.raises(OptionError, match="unknown loss 'kld'; known are kl, reverse_kl, jsd, ce, tv, nla, lk_hybrid"):
        loss_named("kld")
    with pytest.raises(OptionError, match=r"weight base is 1\.2"):
        geometric_weights(3, 1.2)
    with pytest.raises(OptionError, match="0 depths and 0 weights"):
        report([])
    depth = depth_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([True]))
    with pytest.raises(OptionError, match="1 depths and 2 weights"):
        report([depth], [1.0, 0.8])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("excluded", [False, True], ids=["all", "excluded"])
def test_rows_in_pieces_are_all_rows_at_once(name: str, excluded: bool) -> None:
    """Value, gradient, hits and overlap of `judged_loss` are those of the plain formulas."""
    draft, target = logits(5, 100, 9), logits(6, 40, 9)
    if excluded:
        draft[3, 2] = -torch.inf
    law_of_N = torch.randint(-1, 40, (100,), generator=torch.Generator().manual_seed(7))
    counted = law_of_N >= 0
    log_p = log_probabilities(target)
    plain, pieces = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    losses = LOSSES[name](log_probabilities(plain[counted]), log_p[law_of_N[counted]])
    losses.mean().backward()
    found = judged_loss(pieces, log_p, law_of_N, LOSSES[name])
    found.loss.backward()
    assert plain.grad is not None and pieces.grad is not None
    torch.testing.assert_close(found.loss, losses.mean(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pieces.grad, plain.grad, rtol=1e-10, atol=1e-14)
    best = plain[counted].argmax(-1) == target[law_of_N[counted]].argmax(-1)
    torch.testing.assert_close(found.accuracy, best.double().mean())
    shared = overlap(log_probabilities(draft[counted]), log_p[law_of_N[counted]]).mean()
    torch.testing.assert_close(found.overlap, shared)
    assert int(found.rows) == int(counted.sum())


def test_laws_are_not_rounded_where_drafts_are() -> None:
    draft, target = logits(8, 4, 50).float(), log_probabilities(logits(9, 4, 50).float())
    with torch.autocast("cpu", torch.bfloat16):
        found = judged_loss(draft, target, torch.arange(4))
    torch.testing.assert_close(found.loss, kl(log_probabilities(draft), target).mean())


@pytest.mark.parametrize("cap", [None, 2.5])
@pytest.mark.parametrize("name", NAMES)
def test_losses_from_hidden_states_are_those_of_whole_logits(name: str, cap: float | None) -> None:
    """More rows than a block, the last one not full; values and both gradients."""
    log_p = log_probabilities(logits(1, 300, 11))
    found, expected = [], []
    for wanted in (found, expected):
        hidden = logits(2, 300, 5, scale=1.0).requires_grad_()
        head = logits(3, 11, 5, scale=1.0).requires_grad_()
        if wanted is found:
            one = head_loss(hidden, head, lambda rows: log_p[rows], LOSSES[name], cap)
        else:
            whole = hidden @ head.t()
            whole = whole if cap is None else cap * torch.tanh(whole / cap)
            one = judged_loss(whole, log_p, torch.arange(300), LOSSES[name])
        (3 * one.loss).backward()
        assert hidden.grad is not None and head.grad is not None
        assert not one.accuracy.requires_grad and not one.overlap.requires_grad
        wanted += [one.loss.detach(), one.accuracy, one.overlap, one.rows, hidden.grad, head.grad]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_no_rows_no_loss() -> None:
    hidden, head = logits(2, 7, 5).requires_grad_(), logits(3, 11, 5)
    head_loss(hidden, head, lambda rows: log_probabilities(logits(1, 7, 11))[rows]).loss.backward()
    assert head.grad is None and hidden.grad is not None
    none = head_loss(hidden[:0], head, lambda rows: logits(1, 0, 11))
    assert float(none.loss.detach()) == 0 and int(none.rows) == 0


def test_labels_that_cannot_be_said_are_left_out() -> None:
    draft = logits(4, 5, 6).requires_grad_()
    labels = torch.tensor([2, -1, 0, 5, -1])
    found = label_loss(draft, labels)
    log_q = torch.log_softmax(draft.detach(), -1)
    assert float(found.detach()) == pytest.approx(-float(log_q[0, 2] + log_q[2, 0] + log_q[3, 5]) / 3)
    found.backward()
    assert draft.grad is not None and not draft.grad[[1, 4]].any()
    assert float(label_loss(draft, torch.full((5,), -1)).detach()) == 0
