"""Training of recurrent drafters: attention and losses against slow literal float64 ones, gradients, switches."""

import dataclasses
import math

import pytest
import torch

from draftsmith.drafters.draft_layer import Heads, RMSNorm
from draftsmith.drafters.mtp import VARIANTS
from draftsmith.drafters.trainable import LossOptions
from draftsmith.drafters.unrolled_attention import DraftingRows, mix_unrolled
from draftsmith.errors import OptionError
from tests.drafters.trained_fakes import batch_of, info_of, random_module
from tests.models.fakes import tiny_backend

TEXTS = [[5, 9, 3, 3, 8, 1, 60, 2, 7, 7, 12], [4, 4, 9, 1, 0, 33]]
METHODS = ["eagle1", "eagle3", "mtp"]


def random_heads(generator, length=5, batch=2, num_heads=4, num_kv_heads=2, size=3):
    def draw(heads):
        return torch.randn(batch, length, heads, size, generator=generator, dtype=torch.float64)

    return Heads(draw(num_heads), draw(num_kv_heads), draw(num_kv_heads))


def test_attention_of_unrolled_steps_is_the_literal_one():
    """Row t of step s sees step-0 rows up to t and of each later step the row t alone."""
    generator = torch.Generator().manual_seed(0)
    steps = [random_heads(generator) for _ in range(4)]
    drafting = torch.tensor([[False, True, True, False, True], [False, False, False, True, True]])
    rows = DraftingRows.of(drafting)
    for step, now in enumerate(steps):
        batch, _, num_heads, size = now.queries.shape
        own = [(later.keys[drafting], later.values[drafting]) for later in steps[1 : step + 1]]
        mixed = mix_unrolled(now.queries[drafting], steps[0].keys, steps[0].values, own, rows)
        found = torch.zeros_like(now.queries)
        found[drafting] = mixed
        for text in range(batch):
            for row in drafting[text].nonzero().flatten().tolist():
                for head in range(num_heads):
                    kv = head // 2
                    seen = [(steps[0], earlier) for earlier in range(row + 1)]
                    seen += [(steps[later], row) for later in range(1, step + 1)]
                    scores = [
                        sum(
                            float(now.queries[text, row, head, k]) * float(rows.keys[text, place, kv, k])
                            for k in range(size)
                        )
                        / math.sqrt(size)
                        for rows, place in seen
                    ]
                    total = sum(math.exp(score) for score in scores)
                    for k in range(size):
                        expected = sum(
                            math.exp(score) / total * float(rows.values[text, place, kv, k])
                            for score, (rows, place) in zip(scores, seen, strict=True)
                        )
                        assert float(found[text, row, head, k]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_gradients_of_unrolled_attention(num_own):
    generator = torch.Generator().manual_seed(1)
    drafting = torch.tensor([[False, True, True, False, True], [False, False, False, False, True], [False] * 5])
    rows = DraftingRows.of(drafting)
    base = random_heads(generator, batch=3)
    own = [random_heads(generator, batch=3) for _ in range(num_own)]
    leaves = [base.queries[drafting], base.keys, base.values]
    for step in own:
        leaves += [step.keys[drafting], step.values[drafting]]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def mix(queries, keys, values, *pairs):
        return mix_unrolled(queries, keys, values, list(zip(pairs[::2], pairs[1::2], strict=True)), rows)

    assert torch.autograd.gradcheck(mix, leaves)


def test_no_row_drafts():
    rows = DraftingRows.of(torch.zeros(2, 5, dtype=torch.bool))
    heads = random_heads(torch.Generator().manual_seed(1))
    assert mix_unrolled(heads.queries[:0].flatten(0, 1), heads.keys, heads.values, [], rows).shape == (0, 4, 3)


def test_the_norm_is_the_usual_one_and_so_are_its_gradients():
    norm = RMSNorm(6, 1e-5).double()
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-5))
    assert torch.autograd.gradcheck(lambda x, weight: _normed(norm, x, weight), (x, norm.weight))


def _normed(norm, x, weight):
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def case(method, changes=None, dtype=torch.float64, draft_ids=None, prompt_len=3):
    backend = tiny_backend(0, dtype=dtype)
    module = random_module(method, info_of(backend), changes, draft_ids=draft_ids, dtype=dtype)
    return module, batch_of(backend, TEXTS, module.taps, prompt_len)


def literal_depths(module, batch, num_depths, prompt_len):
    """Per depth, the anchors that count: (flat row, draft logits, judge's flat row)."""
    length = batch.tokens_BL.shape[1]
    drafts = list(module.depths(batch, num_depths))
    for depth in range(num_depths):
        rows = [
            text * length + row
            for text in range(len(TEXTS))
            for row in range(length)
            if prompt_len <= row + 2 + depth < len(TEXTS[text])
        ]
        assert drafts[depth].anchors.tolist() == rows
        yield [(row, drafts[depth].logits_AU[place], row + 1 + depth) for place, row in enumerate(rows)]


def log_softmax(logits):
    values = [float(value) for value in logits]
    top = max(values)
    total = top + math.log(sum(math.exp(value - top) for value in values))
    return [value - total for value in values]


@pytest.mark.parametrize("ids", [None, torch.arange(0, 64, 2)], ids=["all", "half"])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_the_loss_is_the_weighted_divergence_of_each_depth(method, ids):
    module, batch = case(method, draft_ids=ids)
    options = LossOptions(loss="kl", decay=0.6, num_depths=3)
    hidden = batch.taps["last_hidden"].flatten(0, 1)
    expected = 0.0
    for depth, anchors in enumerate(literal_depths(module, batch, 3, 3)):
        terms = []
        for _, logits, judge in anchors:
            target = log_softmax([float(hidden[judge] @ row) for row in module.target_head_UD])
            if ids is not None and int(batch.best_BL.flatten()[judge]) not in ids.tolist():
                continue
            draft = log_softmax(logits)
            terms.append(sum(math.exp(p) * (p - q) for p, q in zip(target, draft, strict=True)))
        expected += 0.6**depth * sum(terms) / max(1, len(terms))
    assert float(module.loss(batch, options).loss) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("ids", [None, torch.arange(0, 64, 2)], ids=["all", "half"])
def test_eagle1_learns_features_and_a_tenth_of_the_law(ids):
    module, batch = case("eagle1", draft_ids=ids)
    features = batch.taps["last_hidden"].flatten(0, 1)
    outputs = list(module.unrolled(batch, module.features(batch), 2))
    expected = 0.0
    for depth, anchors in enumerate(literal_depths(module, batch, 2, 3)):
        distances, laws = [], []
        for row, logits, judge in anchors:
            gaps = (outputs[depth].flatten(0, 1)[row] - features[judge]).tolist()
            distances.append(sum(g * g / 2 if abs(g) < 1 else abs(g) - 0.5 for g in gaps) / len(gaps))
            if ids is not None and int(batch.best_BL.flatten()[judge]) not in ids.tolist():
                continue
            target = log_softmax([float(features[judge] @ row) for row in module.target_head_UD])
            draft = log_softmax(logits)
            laws.append(sum(math.exp(p) * (p - q) for p, q in zip(target, draft, strict=True)))
        expected += 0.5**depth * (sum(distances) / len(distances) + 0.1 * sum(laws) / max(1, len(laws)))
    loss = module.loss(batch, LossOptions(decay=0.5, num_depths=2)).loss
    assert float(loss) == pytest.approx(expected, abs=1e-10)


def test_eagle1s_noise_is_drawn_in_training_alone_and_the_same_again():
    module, batch = case("eagle1")
    options = LossOptions(num_depths=1)
    quiet = float(module.loss(batch, options).loss)
    module.train()
    noisy = float(module.loss(batch, options).loss)
    assert noisy != quiet and noisy == float(module.loss(batch, options).loss)
    module.config = dataclasses.replace(module.config, noise=0.0)
    assert float(module.loss(batch, options).loss) == quiet


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_finite_from_a_cold_start(method):
    backend = tiny_backend(0, dtype=torch.float32)
    info = info_of(backend)
    for seed in range(3):
        module = random_module(method, info, draft_ids=torch.arange(0, 64, 2), seed=seed, noise=0.0)
        module.train().requires_grad_(True)
        batch = batch_of(backend, TEXTS, module.taps, 3)
        for options in (type(module).loss_defaults, LossOptions(loss="nla", num_depths=2), LossOptions(loss="tv")):
            module.zero_grad()
            loss = module.loss(batch, options).loss
            loss.backward()
            assert math.isfinite(loss.item())
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
            assert any(parameter.grad.abs().max() > 0 for parameter in module.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_answers_teaches_nothing(method):
    module, batch = case(method)
    module.train().requires_grad_(True)
    silent = dataclasses.replace(batch, answer_BL=torch.zeros_like(batch.answer_BL))
    loss = module.loss(silent, LossOptions(num_depths=3)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or float(p.grad.abs().max()) == 0 for p in module.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method):
    module, _ = case(method)
    backend = tiny_backend(0)
    options = LossOptions(num_depths=3)
    reports = [module.loss(batch_of(backend, [text], module.taps, 3), options) for text in TEXTS]
    both = module.loss(batch_of(backend, TEXTS, module.taps, 3), options)
    rows = sum(report.rows for report in reports)
    assert both.rows.tolist() == rows.tolist()
    overlap = sum(report.overlap * report.rows for report in reports) / rows
    torch.testing.assert_close(both.overlap, overlap, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_unknown_or_impossible_architectures_are_refused(method):
    info = info_of(tiny_backend(0))
    with pytest.raises(OptionError, match="colour"):
        random_module(method, info, {"colour": "3"})
    with pytest.raises(OptionError, match="heads"):
        random_module(method, info, {"num_heads": "3", "num_kv_heads": "2"})


def test_more_impossible_architectures():
    info = info_of(tiny_backend(0))
    with pytest.raises(OptionError, match="known are deepseek, qwen, mimo"):
        random_module("mtp", info, {"variant": "other"})
    with pytest.raises(OptionError, match="noise"):
        random_module("eagle1", info, {"noise": "-1"})
    with pytest.raises(OptionError, match="beyond"):
        random_module("eagle3", info, {"taps": "0-9"})


def test_variants_differ():
    laws = {}
    for variant in VARIANTS:
        module, batch = case("mtp", {"variant": variant})
        laws[variant] = [draft.logits_AU for draft in module.depths(batch, 2)]
    assert torch.equal(laws["deepseek"][0], laws["qwen"][0])
    assert random_module("mtp", info_of(tiny_backend(0)), {"variant": "mimo"}).taps == (2,)  # before the final norm
    assert not torch.allclose(laws["deepseek"][1], laws["qwen"][1])
    assert not torch.allclose(laws["qwen"][0], laws["mimo"][0])


def test_eagle1_has_no_norm_but_the_layers_inner_one():
    names = set(random_module("eagle1", info_of(tiny_backend(0)), {"fc_bias": "true"}).state_dict())
    assert {name for name in names if "norm" in name} == {"layer.post_attention_layernorm.weight"}
    assert "fc.bias" in names
