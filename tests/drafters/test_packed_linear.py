"""Packed linear layers: the products of the weights they hold, bit for bit the same in any company, heads included."""

import numpy as np
import pytest
import torch
from torch import nn

from draftsmith import _native
from draftsmith.drafters.packed_linear import PackedLinear, pack_linears, packed
from draftsmith.errors import ModelFileError
from tests.models.native_models import KERNELS, Model, make_native

SIZES = [(1, 1), (15, 31), (16, 32), (40, 576), (333, 100), (8192, 576)]


@pytest.fixture(scope="module")
def backends():
    return {
        (kernels, threads): make_native(
            Model({"num_heads": 1, "num_kv_heads": 1, "head_dim": 16}), threads, kernels=kernels
        )
        for kernels in KERNELS
        for threads in (1, 2)
    }


def layer_of(outputs, inputs, bias=True):
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kernels", KERNELS)
def test_products_are_those_of_the_weights_and_of_a_row_alone(backends, kernels, bits, outputs, inputs):
    layer = layer_of(outputs, inputs)
    weights = packed(layer.weight, bits)
    one, two = (PackedLinear(weights, layer.bias, backends[kernels, threads]) for threads in (1, 2))
    x = torch.randn(37, inputs, generator=torch.Generator().manual_seed(inputs))
    found = two(x)
    exact = x.double() @ torch.from_numpy(weights.dequantise()).double().T + layer.bias.detach().double()
    # Activations have 8 bits, with a scale per 32 of them.
    off = (found.double() - exact).norm() / exact.norm()
    assert off < 0.02, float(off)
    assert torch.equal(found, one(x))
    for rows in (1, 2, 5, 33):
        assert torch.equal(two(x[:rows]), found[:rows]), rows
    assert torch.equal(two(x.view(37, 1, 1, inputs)), found.view(37, 1, 1, outputs))
    assert two(x[:0]).shape == (0, outputs)
    assert two(x[:3].bfloat16()).dtype == torch.bfloat16


def test_every_linear_layer_is_replaced_and_nothing_else(backends):
    module = nn.ModuleDict({"a": layer_of(16, 32), "b": nn.ModuleList([layer_of(8, 16, bias=False), nn.LayerNorm(8)])})
    x = torch.randn(4, 32)
    expected = module["b"][1](module["b"][0](module["a"](x)))
    pack_linears(module, backends[KERNELS[0], 1], 8)
    assert not any(isinstance(part, nn.Linear) for part in module.modules())
    found = module["b"][1](module["b"][0](module["a"](x)))
    assert torch.allclose(found, expected, atol=0.1)


def test_what_cannot_be_is_refused(backends):
    with pytest.raises(ModelFileError, match="weights"):
        packed(torch.full((4, 4), float("nan")), 8)
    weights = packed(torch.ones(4, 8), 8)
    linear = _native.PackedLinear(weights, 1, False, KERNELS[0])
    out = np.empty((2, 4), np.float32)
    for x in (np.ones((2, 7), np.float32), np.ones((3, 8), np.float32)):
        with pytest.raises(ValueError, match="shape"):
            linear.multiply(x, out)
    with pytest.raises(ValueError, match="thread"):
        _native.PackedLinear(weights, 0, False, KERNELS[0])
    with pytest.raises(ValueError, match="instruction"):
        _native.PackedLinear(weights, 1, False, "abacus")
    with pytest.raises((ValueError, TypeError)):
        _native.PackedLinear(None, 1, False, KERNELS[0])
