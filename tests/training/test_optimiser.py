"""Muon against its definition, and which weights it takes."""

import pytest
import torch
from torch import nn

from draftsmith.training.optimiser import Muon, make_optimiser, orthogonal


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (8, 8), (1, 7)])
def test_orthogonal_is_near_the_orthogonal_factor(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    # Newton-Schulz with these coefficients leaves singular values in a band around 1 and turns nothing.
    values = torch.diag(left.t() @ found @ right.t())
    assert values.min() > 0.65 and values.max() < 1.25
    assert torch.allclose(left @ torch.diag(values) @ right, found, atol=1e-9)


def literal_muon(weight, gradients, lr, weight_decay):
    """Momentum 0.95 with Nesterov's look-ahead, orthogonal step of root mean square 0.2, decoupled decay."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.05 * gradient + 0.95 * momentum
        step = orthogonal(ahead) * 0.2 * max(weight.shape) ** 0.5
        weight = weight - lr * weight_decay * weight - lr * step
    return weight


def test_hidden_matrices_move_as_muon_does_and_the_rest_as_adamw_does():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 9, bias=False)).double()
    twin = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 9, bias=False)).double()
    twin.load_state_dict(module.state_dict())
    optimiser = make_optimiser(module, 0.05, 0.1, "muon", vocabulary=9)
    other = make_optimiser(twin, 0.05, 0.1)
    assert isinstance(optimiser, Muon)
    first = module[0].weight.detach().clone()
    gradients = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    for gradient in gradients:
        for each in (module, twin):
            each[0].weight.grad = gradient.clone()
            each[0].bias.grad = gradient.sum(dim=1)
            each[1].weight.grad = gradient.new_ones(9, 4) * gradient[0, 0]
        optimiser.step()
        other.step()
    assert torch.allclose(module[0].weight, literal_muon(first, gradients, 0.05, 0.1), atol=1e-12)
    assert not torch.allclose(module[0].weight, twin[0].weight)
    assert torch.equal(module[0].bias, twin[0].bias)
    assert torch.equal(module[1].weight, twin[1].weight)
