"""Scaled positions of a draft layer: read, written, and turned by the angles that the target's own layers would use."""

import pytest
import torch

from draftsmith.dialects.llama_layer import layer_config, layer_shape
from draftsmith.drafters.draft_layer import LayerShape, rotate, rotations
from draftsmith.drafters.last_row import LastRowLayer
from draftsmith.errors import OptionError
from draftsmith.models.rope import RotaryTable
from draftsmith.models.spec import RopeSpec
from tests.dialects.support import changed, foreign, published_of, read

SCALINGS = {
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("dialect", ["eagle3", "eagle3-speculators"])
def test_scaled_positions_come_in_and_go_out(dialect, kind):
    published = foreign(published_of("eagle3", dialect))
    inner = dict(published.config.get("transformer_layer_config", published.config))
    inner |= {"rope_theta": 500000.0, "rope_scaling": SCALINGS[kind]}
    config = {"transformer_layer_config": inner} if dialect == "eagle3-speculators" else inner
    found, notes = read(changed(published, config), dialect)
    assert found.config["rope"]["kind"] == kind and found.config["rope_theta"] == 500000.0
    assert f"scaled as {kind}" in notes["positions"]
    sizes = ("width", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "rope_theta", "rope")
    shape = LayerShape(**{key: found.config[key] for key in sizes})
    again, _ = layer_shape(layer_config(shape, 64, 256), "here")
    assert LayerShape(**again).rotary == shape.rotary


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_are_those_of_the_decoder(kind):
    """The decoder rotates pairs (2i, 2i + 1) by a table of its own; the draft layer pairs (i, i + K/2)."""
    given = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 9,
             "intermediate_size": 8, "max_position_embeddings": 256, "rope_scaling": SCALINGS[kind]}  # fmt: skip
    shape = LayerShape(**layer_shape(given, "here")[0])
    positions = torch.tensor([0, 1, 63, 64, 200])
    table = RotaryTable(shape.rotary, shape.head_dim, dtype=torch.float32, device=torch.device("cpu"))
    expected = table.rows(positions, 201)[:, 0]
    cosines, sines = rotations(shape, positions)
    torch.testing.assert_close(cosines, expected.real, rtol=0, atol=1e-6)
    torch.testing.assert_close(sines, expected.imag, rtol=0, atol=1e-6)
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    plain = rotate(x, *rotations(LayerShape(**{**vars(shape), "rope": None}), positions))
    assert not torch.allclose(rotate(x, cosines, sines), plain)
    last = LastRowLayer(shape).turn(positions, x)
    torch.testing.assert_close(last[0], cosines, rtol=0, atol=1e-6)
    torch.testing.assert_close(last[1], sines, rtol=0, atol=1e-6)


def test_two_thetas_are_refused():
    with pytest.raises(OptionError, match="the scaled positions have"):
        LayerShape(width=8, num_heads=1, num_kv_heads=1, head_dim=8, mlp_width=8, rope_theta=5.0,
                   rope=RopeSpec(theta=6.0, kind="linear", factor=2.0))  # fmt: skip
