"""Numbers of EAGLE-3's taps worked by hand, in both conventions; targets too shallow; ids that are no ids."""

import pytest

from draftsmith.dialects.layer_ids import check_convention, default_taps, ids_of, taps_of
from draftsmith.errors import ModelFileError, OptionError
from tests.dialects.support import changed, foreign, make_target, published_of, read

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("ids", "convention", "taps"),
    [
        (None, "auto", (2, 16, 29)),  # of 32 layers: before layers 2, 16 and 29 run
        ([2, 16, 29], "auto", (2, 16, 29)),  # vLLM, speculators: the inputs of these layers
        ([1, 15, 28], "auto", (2, 16, 29)),  # SpecForge, SGLang: the outputs of these layers
        ([1, 15, 28], "applied", (1, 15, 28)),
        ([2, 16, 29], "outputs", (3, 17, 30)),
        ([0, 32], "applied", (0, 32)),
        ([31], "outputs", (32,)),
    ],
)
def test_ids_become_layers_applied(ids, convention, taps):
    assert taps_of(ids, convention, 32, "here")[0] == taps


@pytest.mark.parametrize(
    ("layers", "taps"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (36, (2, 18, 33)), (80, (2, 40, 77))]
)
def test_defaults(layers, taps):
    assert default_taps(layers) == taps


def test_taps_become_ids():
    assert ids_of((2, 16, 29), "auto")[0] == [2, 16, 29]
    assert ids_of((2, 16, 29), "outputs")[0] == [1, 15, 28]
    assert "SGLang" in ids_of((1, 3), "applied")[1].text
    with pytest.raises(OptionError, match="no layer's"):
        ids_of((0, 3), "outputs")


@pytest.mark.parametrize("convention", ["applied", "outputs"])
@pytest.mark.parametrize("taps", [(1, 2, 3), (2, 5, 9), (4,)])
def test_there_and_back(taps, convention):
    assert taps_of(ids_of(taps, convention)[0], convention, 9, "here")[0] == taps


@pytest.mark.parametrize("ids", [[3, 2, 1], [2, 2, 3], [-1, 2, 3], [2, 16, 33], [], "2,3", [2.0, 3], [True, 2]])
def test_what_is_no_list_of_ids(ids):
    with pytest.raises(ModelFileError, match="here: layer ids"):
        taps_of(ids, "applied", 32, "here")


def test_a_shallow_target_has_no_defaults():
    with pytest.raises(ModelFileError, match="a target that has 4"):
        taps_of(None, "auto", 4, "here")


def test_unknown_convention():
    with pytest.raises(OptionError, match="not 'inputs'"):
        check_convention("inputs")


@pytest.mark.parametrize("dialect", ["eagle3", "eagle3-speculators"])
def test_the_whole_way_of_ids(dialect):
    """The target has 8 layers; ids stand at the top level or, with SafeAILab's spelling, in `eagle_config`."""
    published = foreign(published_of("eagle3", dialect))
    assert read(published, dialect)[0].config["taps"] == (2, 4, 5)
    assert read(changed(published, {IDS: [2, 3, 5]}), dialect)[0].config["taps"] == (2, 3, 5)
    assert read(changed(published, {IDS: [2, 3, 5]}), dialect, layer_ids="outputs")[0].config["taps"] == (3, 4, 6)
    found, notes = read(changed(published, {IDS: [1, 2, 4]}), dialect)
    if dialect == "eagle3":
        assert found.config["taps"] == (2, 3, 5)
        assert "outputs of layers (the first id is 1)" in notes["taps"]
        inner = changed(published, {"eagle_config": {IDS: [1, 2, 4]}})
        assert read(inner, dialect)[0].config["taps"] == (2, 3, 5)
    else:
        assert found.config["taps"] == (1, 2, 4)
    assert read(published, dialect, changes={"taps": "0-1-6"})[0].config["taps"] == (0, 1, 6)


def test_exported_ids():
    assert make_target().spec.num_layers == 8
    assert IDS not in published_of("eagle3", "eagle3").config
    assert published_of("eagle3", "eagle3-speculators").config[IDS] == [2, 4, 5]
    assert published_of("eagle3", "eagle3", layer_ids="outputs").config[IDS] == [1, 3, 4]
    assert published_of("eagle3-all", "eagle3").config[IDS] == [1, 2, 8]
    assert published_of("eagle3-all", "eagle3-speculators").config[IDS] == [1, 2, 8]
