"""A run that tunes its target: it goes on exactly, its target waits for the heads, and its drift is told."""

import dataclasses

import pytest
import torch

from draftsmith.errors import OptionError
from draftsmith.io.files import open_model
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec
from draftsmith.training.processes import Processes
from draftsmith.training.run import carry_out, prepare
from draftsmith.training.state import read_state
from draftsmith.training.trainer import Listener
from tests.drafters.model_on_disk import write_model
from tests.training.test_trainer import log_of, losses_of, weights_of
from tests.training.tiny import VOCAB, settings_of, target_of

CHANGES = {"rank": "2", "num_depths": "2", "heads_first": "0.3"}


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target") / "target", vocab_size=VOCAB, files={}, width=32, head_dim=8)


def train(data, output, name, *, stop_after=None, configure=CHANGES, **changes):
    """Run or continue; returns the trainer."""
    files = open_model(name)
    backend = ReferenceBackend.from_weights(DecoderSpec.from_config(files.config), files.load)
    target = dataclasses.replace(target_of(backend), name=name)
    own = {"method": "medusa2", "configure": configure, "draft_vocab": None, "depths": 2, **changes}
    job = prepare(settings_of(data, output, **own), target, Processes())
    steps = []
    listener = Listener(
        on_step=lambda report, progress, num_steps: steps.append(report),
        stop=lambda: stop_after is not None and len(steps) >= stop_after,
    )
    return carry_out(job, listener, Processes(), tell=lambda line: None)


def target_weights(trainer):
    return {key: tensor for key, tensor in weights_of(trainer).items() if key.startswith("backbone.")}


@pytest.fixture(scope="module")
def whole(data, name, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "drafter"
    torch.set_num_threads(1)
    return output, train(data, output, name)


@pytest.mark.parametrize("at", [1, 5])
def test_a_continued_run_is_bit_for_bit_the_uninterrupted_one(data, tmp_path, name, whole, at):
    """Before and after the target begins to learn."""
    output, expected = whole
    stopped = train(data, tmp_path / "drafter", name, stop_after=at)
    assert stopped.progress.step == at
    trainer = train(data, tmp_path / "drafter", name)
    assert losses_of(tmp_path / "drafter") == losses_of(output)
    for key, tensor in weights_of(trainer).items():
        assert torch.equal(tensor, weights_of(expected)[key]), key


def test_a_state_holds_what_is_trained(whole):
    tensors, _ = read_state(whole[0].with_name("drafter.state") / "last.safetensors")
    names = [key for key in tensors if key.startswith("weight.backbone.")]
    assert names and all("lora_" in key for key in names)


def test_the_target_waits_for_the_heads(data, tmp_path, name, whole):
    """Of eight steps three go to the heads alone (progress 0, 1/8, 2/8 are below 0.3)."""
    early = train(data, tmp_path / "early", name, stop_after=3)
    before = {key: tensor for key, tensor in target_weights(early).items() if key.endswith("lora_b")}
    assert before and not any(tensor.any() for tensor in before.values())
    after = target_weights(whole[1])
    assert any(after[key].any() for key in before)


def test_drift_is_told(data, tmp_path, name):
    train(data, tmp_path / "none", name, configure={**CHANGES, "target_rate": "1e-9"})
    assert [line["agreement"] for line in log_of(tmp_path / "none", "validation")] == [1.0] * len(
        log_of(tmp_path / "none", "validation")
    )
    train(data, tmp_path / "much", name, configure={**CHANGES, "target_rate": "50", "coefficient": "20"})
    assert log_of(tmp_path / "much", "validation")[-1]["agreement"] < 0.9


def test_heads_alone_cannot_be_gone_on_from(data, tmp_path, name, whole):
    from draftsmith.drafters.checkpoint import save_module

    _, trainer = whole
    files = open_model(name)
    backend = ReferenceBackend.from_weights(DecoderSpec.from_config(files.config), files.load)
    target = dataclasses.replace(target_of(backend), name="", tokenizer=None)
    save_module(tmp_path / "tuned", "medusa2", trainer.module, name, target, {})
    with pytest.raises(OptionError, match=r"go on with that target: --model .*without --init"):
        train(data, tmp_path / "out", name, configure={}, init=tmp_path / "tuned")
