"""Medusa-2: the joint loss, what is tuned when, and a target that is a model of its own."""

import dataclasses
import math

import pytest
import torch

from draftsmith.core.losses import LOSSES, kl, log_probabilities
from draftsmith.core.stats import summarise
from draftsmith.drafters.checkpoint import TARGET, load_module, save_module
from draftsmith.drafters.lora import LoraLinear
from draftsmith.drafters.trainable import LossOptions
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import load_model
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.io.files import open_model
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec
from draftsmith.training.optimiser import make_optimiser
from tests.drafters import model_on_disk as disk
from tests.drafters.trained import new_module
from tests.drafters.trained_fakes import batch_of

TEXTS = [[3, 7, 1, 0, 19, 4, 4, 12, 6], [5, 5, 2, 13, 9], [1, 2]]
PROMPTS = [3, 1, 1]
LORA, FULL, SHARED = {"num_depths": "2", "rank": "4"}, {"num_depths": "2", "tune": "full"}, {"head": "target"}
CASES = {"lora": LORA, "full": FULL, "target's head": {**FULL, **SHARED}, "few": {**LORA, "head": "shared"}}
IDS = {"few": torch.tensor([0, 1, 3, 4, 6, 7, 9, 12, 19, *range(40, 120)])}


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    return disk.write_model(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def target(name):
    return disk.target_of(name)


def shaken(module, size=0.1, seed=2):
    """Every weight that is trained moved a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return module


def tuned_backend(module, target, dtype=torch.float64):
    """The target that would be written, on the reference backend."""
    layout = module.layout(target).target
    return ReferenceBackend.from_weights(
        DecoderSpec.from_config(layout.config), layout.tensors.__getitem__, dtype=dtype
    )


@pytest.mark.parametrize("case", CASES)
def test_at_first_the_tuned_target_is_the_target(target, case):
    module = new_module("medusa2", target, CASES[case], IDS.get(case))
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    seen = module.as_verified(batch)
    judged = torch.zeros_like(batch.answer_BL)
    judged[:, :-1] = batch.answer_BL[:, 1:]
    torch.testing.assert_close(seen.log_total_BL[judged], batch.log_total_BL[judged], atol=1e-4, rtol=0)
    assert torch.equal(seen.best_BL[judged], batch.best_BL[judged])
    language = (
        module.loss(batch, LossOptions(progress=0.5)).loss
        - 0.2 * math.sin(math.pi / 2 * 0.4 / 0.9) * module.loss(batch, LossOptions(progress=0.0)).loss
    )
    assert float(language.detach()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", ["kl", "ce", "tv"])
def test_the_loss_is_the_papers(target, case, loss):
    """Literal float64: KL(untuned, tuned) over judged rows + c s(t) * heads, judged by the tuned target's laws."""
    ids = IDS.get(case)
    module = shaken(new_module("medusa2", target, CASES[case], ids).double())
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    tuned = batch_of(tuned_backend(module, target), TEXTS, prompt_len=PROMPTS)
    tuned_head = tuned_backend(module, target).head_rows(torch.arange(disk.VOCAB)).double()
    head = target.backend.head_rows(torch.arange(disk.VOCAB)).double()
    draft_ids = torch.arange(disk.VOCAB) if ids is None else ids
    divergences, depths = [], [[], []]
    for index, text in enumerate(TEXTS):
        hidden, untuned = tuned.taps["last_hidden"][index], batch.taps["last_hidden"][index].double()
        for row in range(len(text) - 1):
            if row + 1 < PROMPTS[index]:
                continue
            log_q, log_p = log_probabilities(tuned_head @ hidden[row]), log_probabilities(head @ untuned[row])
            divergences.append(kl(log_q[None], log_p[None])[0])
            for depth in range(2):
                anchor = row - 1 - depth
                if anchor < 0 or int((tuned_head @ hidden[row]).argmax()) not in draft_ids:
                    continue
                x = hidden[anchor]
                for block in module.blocks[depth]:
                    x = x + torch.nn.functional.silu(block.weight @ x + block.bias)
                rows = module.lm_heads[min(depth, len(module.lm_heads) - 1)].weight if module.lm_heads else tuned_head
                law = log_probabilities((tuned_head @ hidden[row])[draft_ids])
                depths[depth].append(LOSSES[loss](log_probabilities(rows @ x)[None], law[None])[0])
    heads = sum(0.8**depth * torch.stack(found).mean() for depth, found in enumerate(depths) if found)
    expected = torch.stack(divergences).mean() + 0.2 * math.sin(math.pi / 2 * (0.7 - 0.1) / 0.9) * heads
    report = module.loss(batch, LossOptions(loss=loss, num_depths=2, progress=0.7))
    torch.testing.assert_close(report.loss, expected, atol=2e-6, rtol=1e-6)
    alone = module.loss(batch, LossOptions(loss=loss, num_depths=2, progress=0.05))
    torch.testing.assert_close(alone.loss, heads, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_finite_at_a_cold_start_and_reach_what_is_tuned(target, case, loss):
    module = new_module("medusa2", target, {**CASES[case], "language": loss}, IDS.get(case))
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    for progress in (0.05, 0.5):
        module.zero_grad()
        report = module.loss(batch, LossOptions(loss=loss, num_depths=2, progress=progress))
        report.loss.backward()
        assert bool(torch.isfinite(report.loss))
        for key, parameter in module.named_parameters():
            in_target = module.part_of(key) == "target"
            assert (parameter.grad is None) == (in_target and progress == 0.05), key
            assert parameter.grad is None or bool(torch.isfinite(parameter.grad).all()), key


def test_the_target_waits_and_then_learns_slower(target):
    module = new_module("medusa2", target, {**LORA, "heads_first": "0.2", "target_rate": "0.5"})
    assert {module.part_of(key) for key, _ in module.named_parameters()} == {"", "target"}
    rates = [module.rate_factor("target", progress) for progress in (0.0, 0.2, 0.3, 0.4, 1.0)]
    assert rates == pytest.approx([0, 0, 0.25, 0.5, 0.5])
    assert module.rate_factor("", 0.1) == 1
    parts = {group["part"] for group in make_optimiser(module, 1e-3, 0.0, part_of=module.part_of).param_groups}
    assert parts == {"", "target"}


def test_a_low_rank_change_is_all_that_a_state_holds(target):
    module = new_module("medusa2", target, LORA)
    names = set(module.state_dict())
    assert all("lora_" in name for name in names if name.startswith("backbone."))
    assert sum(isinstance(child, LoraLinear) for child in module.modules()) == 7 * target.backend.spec.num_layers
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == names


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_a_model_and_its_heads(target, name, case, tmp_path):
    module = shaken(new_module("medusa2", target, CASES[case], IDS.get(case)))
    save_module(tmp_path / "out", "medusa2", module, name, target, {})
    tuned = disk.target_of(str(tmp_path / "out" / TARGET))
    batch = batch_of(tuned.backend, TEXTS, prompt_len=PROMPTS)
    seen = module.as_verified(batch)
    for index, text in enumerate(TEXTS):
        for tap in ("last_hidden",):
            torch.testing.assert_close(
                seen.taps[tap][index, : len(text)], batch.taps[tap][index, : len(text)], atol=1e-4, rtol=0
            )
    again = load_module(tmp_path / "out", "medusa2", tuned)
    assert again.backbone is None
    for mine, other in zip(module.depths(seen, 2), again.depths(batch, 2), strict=True):
        assert torch.equal(mine.anchors, other.anchors)
        torch.testing.assert_close(mine.logits_AU, other.logits_AU, atol=1e-3, rtol=0)
    selection = f"medusa2:path={tmp_path / 'out'}"
    with pytest.raises(ModelFileError, match=rf"take that target: --model {tmp_path / 'out' / TARGET}"):
        Engine(load_model(name, backend="reference"), EngineSettings(drafter=selection))
    Engine(load_model(str(tmp_path / "out" / TARGET), backend="reference"), EngineSettings(drafter=selection))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tune": "some"}, "tune is 'some'"),
        ({"rank": "0"}, "rank is 0"),
        ({"scale": "0"}, "scale is 0.0"),
        ({"heads_first": "1"}, "heads_first is 1.0"),
        ({"schedule": "cosine"}, "unknown schedule"),
        ({"language": "luck"}, "unknown loss"),
        ({"target_rate": "-1"}, "target_rate is -1.0"),
    ],
)
def test_mistakes(target, changes, part):
    with pytest.raises(OptionError, match=part) as caught:
        new_module("medusa2", target, changes)
    assert "\n" not in str(caught.value)


def test_a_target_without_files_cannot_be_tuned(target):
    with pytest.raises(ModelFileError, match="needs the target's weights"):
        new_module("medusa2", dataclasses.replace(target, name=""), {})


# -- through the engine -------------------------------------------------------------------------------

COUNT, PROMPT_LEN, ANSWER_LEN, NUM_STEPS = 50, 6, 18, 120


@pytest.fixture(scope="module")
def learned(target, name, tmp_path_factory):
    """Prompts, and the directory of heads and target that were tuned on the target's answers."""
    noise = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 256, (PROMPT_LEN,), generator=noise).tolist() for _ in range(COUNT)]
    engine = Engine(load_model(name, backend="reference"), EngineSettings(drafter="none"))
    results = engine.generate(prompts, max_new_tokens=ANSWER_LEN, ignore_eos=True)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
    changes = {"num_depths": "2", "num_layers": "2", "rank": "8", "heads_first": "0.3", "target_rate": "0.005"}
    module = new_module("medusa2", target, changes)
    batch = batch_of(target.backend, texts, prompt_len=PROMPT_LEN)
    optimiser = make_optimiser(module, 1e-2, 0.0, part_of=module.part_of)
    for step in range(NUM_STEPS):
        done = step / NUM_STEPS
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * (1 - 0.95 * done) * module.rate_factor(group["part"], done)
        optimiser.zero_grad()
        module.loss(batch, LossOptions(loss="ce", decay=0.5, num_depths=2, progress=done)).loss.backward()
        optimiser.step()
    untouched = open_model(name).load("model.layers.0.mlp.up_proj.weight")
    assert not torch.equal(module.layout(target).target.tensors["model.layers.0.mlp.up_proj.weight"], untouched)
    path = tmp_path_factory.mktemp("tuned") / "medusa2"
    save_module(path, "medusa2", module, name, target, {}, dtype=torch.float32)
    return prompts, path


def test_fifty_texts_are_learned(learned, name):
    """First-position acceptance beside the tuned target is at least 0.9; its ids are those of its own plain run."""
    prompts, path = learned
    model = load_model(str(path / TARGET), backend="reference")
    engine = Engine(model, EngineSettings(drafter=f"medusa2:path={path}", controller="fixed:num_draft=2"))
    asked = {"max_new_tokens": ANSWER_LEN, "ignore_eos": True}
    wanted = engine.generate(prompts, drafter="none", **asked)
    engine.take_events()
    results = engine.generate(prompts, **asked)
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
    events = engine.take_events()
    records = [record for record in events.requests if record.drafted]
    assert sum(record.accepted > 0 for record in records) / len(records) >= 0.9
    counts = summarise(events)
    assert counts.emitted / counts.pairs > 2
    # It is a model of its own, near the one it comes from.
    original = Engine(load_model(name, backend="reference"), EngineSettings(drafter="none")).generate(prompts, **asked)
    before = torch.tensor([result.token_ids for result in original])
    after = torch.tensor([result.token_ids for result in wanted])
    assert 0.5 < float((before == after).float().mean()) <= 1


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("tree", ["chain", "2x2"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "coupled"])
def test_ids_are_the_tuned_targets_plain_runs(learned, backend, tree, params):
    prompts, path = learned
    model = load_model(str(path / TARGET), backend=backend)
    settings = EngineSettings(
        drafter=f"medusa2:path={path}:tree={tree}", controller="fixed:num_draft=5", max_batch=3, chunk_rows=7
    )
    engine = Engine(model, settings)
    asked = {"max_new_tokens": ANSWER_LEN, "ignore_eos": True, **params}
    wanted = engine.generate(prompts[:6], drafter="none", **asked)
    for _turn in range(2):
        results = engine.generate(prompts[:6], **asked)
        assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
        assert sum(result.statistics.accepted_tokens for result in results) > 0
