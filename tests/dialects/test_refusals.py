"""What is missing, unknown, misshapen, of another target or of another drafter is refused by its name."""

import dataclasses

import pytest
import torch

from draftsmith.dialects.convert import export
from draftsmith.dialects.dialect import Choices
from draftsmith.dialects.table import DIALECTS, detect, dialect_named
from draftsmith.errors import ModelFileError, OptionError, UnsupportedError
from tests.dialects.support import HELD, PAIRS, changed, foreign, make_target, native_of, published_of, read

FIRST = {dialect: drafters[0] for dialect, drafters in HELD.items()}
OPTIONAL = ("t2d", ".bias", "embed_tokens", "shared_head.head", "speculator.head.")


def needed(dialect, drafter):
    """Tensors without which an import must fail."""
    published = published_of(drafter, dialect)
    return sorted(name for name in published.names if not any(part in name for part in OPTIONAL))


@pytest.mark.parametrize(("dialect", "drafter"), PAIRS)
def test_every_tensor_is_missed_by_name(dialect, drafter):
    published, named = published_of(drafter, dialect), 0
    names = needed(dialect, drafter)
    for name in names:
        # Without some tensors a head or a whole drafter is not there at all: other words, the same end.
        with pytest.raises((ModelFileError, OptionError)) as caught:
            read(changed(published, without=(name,)), dialect)
        assert str(published.path) in str(caught.value)
        named += f"{name!r} is missing" in str(caught.value)
    assert named >= len(names) / 3


@pytest.mark.parametrize(("dialect", "drafter"), PAIRS)
def test_every_unknown_tensor_is_named(dialect, drafter):
    published = published_of(drafter, dialect)
    inside = next(iter(sorted(published.names))).rpartition(".")[0] + ".surprise"
    with pytest.raises(ModelFileError, match=r"'\S*surprise' is unknown"):
        read(changed(published, tensors={inside: torch.zeros(2)}), dialect)


@pytest.mark.parametrize(("dialect", "drafter"), PAIRS)
def test_every_shape_is_checked(dialect, drafter):
    published = published_of(drafter, dialect)
    for name in published.names:
        tensor = published.load(name)
        with pytest.raises((ModelFileError, OptionError)):
            read(changed(published, tensors={name: torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]))}), dialect)


@pytest.mark.parametrize("dialect", FIRST)
def test_weights_must_be_finite_numbers(dialect):
    published = published_of(FIRST[dialect], dialect)
    name = next(name for name in sorted(published.names) if "norm" in name or "linear" in name or ".ln." in name
                or "layers.0" in name)  # fmt: skip
    broken = published.load(name).clone()
    broken.view(-1)[0] = float("nan")
    with pytest.raises(ModelFileError, match=f"{name}.*not finite"):
        read(changed(published, tensors={name: broken}), dialect)
    with pytest.raises(ModelFileError, match=f"{name}.*floating point"):
        read(changed(published, tensors={name: torch.ones(broken.shape, dtype=torch.int64)}), dialect)


@pytest.mark.parametrize("dialect", FIRST)
def test_another_target_is_refused(dialect):
    published = foreign(published_of(FIRST[dialect], dialect))
    wider = make_target(hidden_size=64, num_attention_heads=8)
    with pytest.raises(ModelFileError, match=r"another target|is missing|shape"):
        read(published, dialect, wider)
    more = make_target(vocab_size=65)
    with pytest.raises(ModelFileError, match=r"another target|is missing|shape"):
        read(published, dialect, more)


@pytest.mark.parametrize("dialect", FIRST)
def test_copies_of_the_targets_matrices_are_compared(dialect):
    published = published_of(FIRST[dialect], dialect, with_target=True)
    copies = [name for name in published.names if "embed_tokens" in name or "shared_head.head" in name]
    for name in copies:
        _, notes = read(published, dialect)
        assert "(the same)" in notes["embedding"]
        close = published.load(name) + 0.001 * torch.randn(
            published.shape(name), generator=torch.Generator().manual_seed(0)
        )
        _, notes = read(changed(published, tensors={name: close}), dialect)
        other = published.load(name).roll(1, dims=0)
        with pytest.raises(ModelFileError, match=f"{name}' is not the (embedding|head) of tiny"):
            read(changed(published, tensors={name: other}), dialect)


def test_the_targets_head_is_compared_where_it_is_needed():
    published = published_of("medusa-target", "medusa-vllm")
    other = published.load("lm_heads.0.weight").roll(1, dims=0)
    with pytest.raises(ModelFileError, match="not the head of tiny"):
        read(changed(published, tensors={"lm_heads.0.weight": other}), "medusa-vllm")
    found, _ = read(foreign(published), "medusa-vllm")  # others' files: one matrix for all, whoever's it is
    assert found.config["head"] == "shared"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_drafters_of_another_kind_are_not_written(dialect):
    for drafter in ("eagle3", "eagle1", "medusa", "hydra", "mlp", "mtp"):
        native = native_of(drafter)
        if native.method not in dialect_named(dialect).methods:
            with pytest.raises(UnsupportedError, match=f"{dialect} holds drafters of .*, not of {native.method}"):
                export(native, dialect_named(dialect), make_target(), Choices())


@pytest.mark.parametrize(
    ("dialect", "drafter", "complaint"),
    [
        ("mtp-mimo", "mtp", "cannot say hidden_first = False"),
        ("mtp-qwen", "mtp", "cannot say norm_output = False"),
        ("mtp-deepseek", "mtp-qwen", "cannot say norm_output = True"),
    ],
)
def test_what_a_dialect_cannot_say(dialect, drafter, complaint):
    with pytest.raises(UnsupportedError, match=complaint):
        published_of(drafter, dialect)


def test_layers_of_other_proportions_than_the_config_says():
    native = native_of("mtp")
    deeper = make_target(rope_theta=5000.0)
    with pytest.raises(UnsupportedError, match="cannot say rope_theta"):
        export(native, dialect_named("mtp-deepseek"), deeper, Choices())
    plus = native_of("hydra++")
    with pytest.raises(UnsupportedError, match="cannot say prefix"):
        export(plus, dialect_named("hydra"), deeper, Choices())


@pytest.mark.parametrize(
    ("dialect", "config", "complaint"),
    [
        ("eagle3", {"num_hidden_layers": 2}, "2 draft layers"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc"),
        ("eagle3", {"norm_output": False}, "SpecForge"),
        ("eagle3", {"norm_before_residual": "yes"}, "true or false"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "without taps"),
        ("eagle3", {"eagle_config": [1]}, "must be an object"),
        ("eagle3", {"hidden_act": "gelu"}, "'hidden_act' 'gelu'"),
        ("eagle3", {"target_hidden_size": 48}, "another target"),
        ("eagle3", {"hidden_size": 48, "target_hidden_size": 32}, "embedding of its own"),
        ("eagle3", {"model_type": "gemma2"}, "sliding window|norms|activation"),
        ("eagle3", {"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ("eagle3", {"partial_rotary_factor": 0.5}, "partial rotary"),
        ("eagle3", {"vocab_size": None}, "another target"),
        ("eagle3-speculators", {"transformer_layer_config": None}, "must be an object"),
        ("eagle3-speculators", {"norm_output": 1}, "true or false"),
        ("eagle1", {"num_hidden_layers": 2}, "2 draft layers"),
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "architecture 'eagle-attn'"),
        ("hydra", {"grounded_heads": False}, "is Medusa"),
        ("hydra", {"hidden_state_offset": 1}, "hidden_state_offset"),
        ("mlp-speculator", {"n_predict": "3"}, "whole number"),
        ("mlp-speculator", {"inner_dim": [16, 16]}, "another kind of speculator"),
        ("mtp-qwen", {"attn_output_gate": True}, "gated attention"),
    ],
)
def test_configs_that_ask_for_something_else(dialect, config, complaint):
    published = foreign(published_of(FIRST[dialect], dialect))
    with pytest.raises((ModelFileError, UnsupportedError), match=complaint):
        read(changed(published, config), dialect)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("mlp.experts.0.up_proj.weight", "experts"), ("self_attn.kv_a_proj.weight", "latent attention")],
)
def test_prediction_layers_of_other_kinds(name, complaint):
    published = published_of("mtp", "mtp-deepseek")
    with pytest.raises(UnsupportedError, match=complaint):
        read(changed(published, tensors={f"model.layers.8.{name}": torch.zeros(2, 2)}), "mtp-deepseek")


@pytest.mark.parametrize(
    ("mark", "complaint"),
    [
        ("1", "not one that this version writes"),
        ({"export": 2}, "not one that this version writes"),
        ({"export": 1, "method": 3, "config": {}, "about": {}}, "method"),
        ({"export": 1, "method": "medusa", "config": {}, "about": {}}, "not of eagle3"),
        ({"export": 1, "method": "eagle3", "config": {"width": 3}, "about": {}}, "config.width"),
    ],
)
def test_marks_that_are_not_ours(mark, complaint):
    published = changed(published_of("eagle3", "eagle3"), {"draftsmith": mark})
    with pytest.raises(ModelFileError, match=complaint):
        read(published, "eagle3")


def test_fields_can_be_pinned_and_others_are_refused():
    published = foreign(published_of("eagle3", "eagle3"))
    found, _ = read(published, "eagle3", changes={"norm_output": "true", "rope_theta": "500"})
    assert (found.config["norm_output"], found.config["rope_theta"]) == (True, 500.0)
    for changes in ({"colour": "red"}, {"norm_output": "maybe"}, {"rope": "yarn"}):
        with pytest.raises(OptionError, match="fields that can be set"):
            read(published, "eagle3", changes=changes)
    with pytest.raises(OptionError, match="rising"):
        read(published, "eagle3", changes={"taps": "3-2"})


def test_what_no_dialect_knows():
    published = changed(published_of("eagle1", "eagle1"), without=("fc.weight",))
    with pytest.raises(ModelFileError, match=r"no known drafter .*--from NAME"):
        detect(published)
    with pytest.raises(OptionError, match="unknown dialect 'eagle9'"):
        dialect_named("eagle9")


def test_embeddings_that_are_scaled_cannot_be_exchanged():
    target = dataclasses.replace(make_target(), spec=dataclasses.replace(make_target().spec, embedding_scale=4.0))
    for dialect in ("eagle1", "hydra"):
        native = native_of(FIRST[dialect])
        with pytest.raises(UnsupportedError, match="scales its embeddings"):
            export(native, dialect_named(dialect), target, Choices())
        with pytest.raises(UnsupportedError, match="scales its embeddings"):
            read(published_of(FIRST[dialect], dialect), dialect, target)


def test_copies_that_differ():
    for dialect, drafter, name in (
        ("medusa", "medusa-shared", "1.1.weight"),
        ("mlp-speculator", "mlp", "speculator.head.2.weight"),
    ):
        published = published_of(drafter, dialect)
        with pytest.raises(ModelFileError, match=f"'{name}' are one in this drafter and differ"):
            read(changed(published, tensors={name: 2 * published.load(name)}), dialect)
