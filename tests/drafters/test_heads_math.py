"""Head families against slow literal float64 implementations, written token by token from the papers' formulas."""

import math

import pytest
import torch

from draftsmith.core.losses import LOSSES, log_probabilities
from draftsmith.drafters.medusa import joint_loss
from draftsmith.drafters.rank_accuracy import rank_accuracies
from draftsmith.drafters.trainable import LossOptions
from draftsmith.errors import OptionError
from tests.drafters.loop import target_of
from tests.drafters.trained import new_module
from tests.drafters.trained_fakes import batch_of
from tests.models.fakes import tiny_backend

VOCAB = 20
IDS = [0, 2, 3, 5, 6, 7, 11, 12, 13, 14, 17, 19]
TEXTS = [[3, 7, 1, 0, 19, 4, 4, 12, 6], [5, 5, 2, 13, 9], [1, 2]]
PROMPTS = [3, 1, 1]
CASES = {
    "medusa": ("medusa", {"num_depths": "3", "num_layers": "2"}),
    "medusa own": ("medusa", {"num_depths": "2", "head": "own"}),
    "hydra": ("hydra", {"num_depths": "3", "num_layers": "2", "feature_weight": "0.3"}),
    "hydra labels": ("hydra", {"label_weight": "0.6", "teacher_weight": "0.5", "feature_weight": "0.3"}),
    "hydra++": ("hydra", {"num_depths": "3", "prefix": "true", "head": "shared"}),
    "mlp": ("mlp_speculator", {"num_depths": "3", "inner_width": "6"}),
    "mlp untied": ("mlp_speculator", {"num_depths": "2", "tied": "false", "scale_input": "false"}),
    "gloeckle": ("gloeckle", {"num_depths": "2"}),
}


def case(name, draft_ids=IDS, seed=3):
    """A module in float64 with random weights (not its own first ones, which leave parts at zero), and a batch."""
    backend = tiny_backend(1, vocab_size=VOCAB, width=16, head_dim=4, mlp_width=24)
    target = target_of(backend)
    method, changes = CASES[name]
    module = new_module(method, target, changes, None if draft_ids is None else torch.tensor(draft_ids)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module, batch_of(backend, TEXTS, module.needs, PROMPTS), backend


# -- the papers' formulas, one row at a time ----------------------------------------------------------


def silu(x):
    return x / (1 + torch.exp(-x))


def rms(x, eps, weight=None):
    normed = x / torch.sqrt((x * x).sum() / len(x) + eps)
    return normed if weight is None else normed * weight


def linear(layer, x):
    rows = [sum(w * v for w, v in zip(row, x, strict=True)) for row in layer.weight]
    return torch.stack(rows) + (0 if layer.bias is None else layer.bias)


def turned(vector, position, theta):
    """Rotary positions of one head, pair (i, i + K/2); angles as float32 has them."""
    half = len(vector) // 2
    result = vector.clone()
    for pair in range(half):
        frequency = 1.0 / (torch.tensor(theta, dtype=torch.float32) ** torch.tensor(2 * pair / (2 * half)))
        angle = (torch.tensor(float(position)) * frequency).to(torch.float32)
        cosine, sine = float(angle.cos()), float(angle.sin())
        result[pair] = vector[pair] * cosine - vector[pair + half] * sine
        result[pair + half] = vector[pair + half] * cosine + vector[pair] * sine
    return result


def decoder_layer(layer, rows, place):
    """Output of row `place` of a Llama layer over `rows`."""
    shape, attention = layer.shape, layer.layer.self_attn
    size = shape.head_dim
    normed = [rms(row, shape.norm_eps, layer.input_layernorm.weight) for row in rows[: place + 1]]
    queries = linear(attention.q_proj, normed[place]).view(-1, size)
    mixed = []
    for head in range(shape.num_heads):
        key_head = head // (shape.num_heads // shape.num_kv_heads)
        query = turned(queries[head], place, shape.rope_theta)
        scores, values = [], []
        for position, row in enumerate(normed):
            key = turned(linear(attention.k_proj, row).view(-1, size)[key_head], position, shape.rope_theta)
            scores.append((query * key).sum() / math.sqrt(size))
            values.append(linear(attention.v_proj, row).view(-1, size)[key_head])
        weights = torch.exp(torch.stack(scores) - max(scores))
        weights = weights / weights.sum()
        mixed.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
    x = rows[place] + linear(attention.o_proj, torch.cat(mixed))
    mlp, inner = layer.layer.mlp, rms(x, shape.norm_eps, layer.layer.post_attention_layernorm.weight)
    return x + linear(mlp.down_proj, silu(linear(mlp.gate_proj, inner)) * linear(mlp.up_proj, inner))


def output_matrix(module, depth):
    if not module.lm_heads:
        return module.target_head_UD
    return module.lm_heads[min(depth, len(module.lm_heads) - 1)].weight


def medusa_hidden(module, embed, hidden, tokens, t, depth):
    x = hidden[t]
    for block in module.blocks[depth]:
        x = x + silu(linear(block, x))
    return x


def hydra_hidden(module, embed, hidden, tokens, t, depth):
    z = hidden[t]
    if module.prefix_layer is not None:
        norm = module.prefix_norm
        z = rms(decoder_layer(module.prefix_layer, hidden, t), norm.eps, norm.weight)
    inputs = torch.cat([z, *(embed(tokens[t + 1 + step]) for step in range(depth + 1))])
    head = module.heads[depth]
    x = linear(head.res_connection, inputs) + silu(linear(head.linear, inputs))
    for block in head.blocks:
        x = x + silu(linear(block, x))
    return x


def mlp_hidden(module, embed, hidden, tokens, t, depth):
    config = module.config
    state = hidden[t]
    if config.scale_input:
        state = rms(state, 1e-6) / math.sqrt(2)
    state_weight = 2 ** (-1 / (2 * config.num_depths))
    factor = math.sqrt((1 - state_weight**2) * config.inner_width / 2) / state_weight
    for stage in range(depth + 1):
        one = 0 if config.tied else stage
        projection = module.proj[min(stage, 1) if config.tied else stage]
        norm = module.ln[one]
        mixed = linear(projection, state) + factor * module.emb[one].weight[tokens[t + 1 + stage]]
        normed = rms(mixed, 1e-6, norm.weight) + norm.bias
        state = normed * 0.5 * (1 + torch.erf(normed / math.sqrt(2)))
    return state


def gloeckle_hidden(module, embed, hidden, tokens, t, depth):
    return decoder_layer(module.layers[depth], hidden, t)


FORMULAS = {
    "medusa": medusa_hidden,
    "hydra": hydra_hidden,
    "mlp_speculator": mlp_hidden,
    "gloeckle": gloeckle_hidden,
}


def literal(name, module, batch, backend, num_depths):
    """Per depth: (text, t, logits over the draft ids, what the output matrix read) of every anchor."""
    formula = FORMULAS[CASES[name][0]]
    found = []
    for depth in range(num_depths):
        rows = []
        for index, text in enumerate(TEXTS):
            hidden = batch.taps["last_hidden"][index].double()
            for t in range(len(text)):
                if not PROMPTS[index] <= t + 2 + depth < len(text):
                    continue
                embed = lambda token: backend.embed(torch.tensor([token]))[0].double()  # noqa: E731
                x = formula(module, embed, hidden, text, t, depth)
                logits = torch.stack([(row * x).sum() for row in output_matrix(module, depth)])
                if CASES[name][0] == "hydra":
                    logits = logits + module.head_bias[depth]
                rows.append((index, t, logits, x))
        found.append(rows)
    return found


def target_rows(batch, backend, index, place):
    """The target's logits [V] of one row."""
    hidden = batch.taps["last_hidden"][index, place].double()
    return backend.head_rows(torch.arange(VOCAB)).double() @ hidden


@pytest.mark.parametrize("name", CASES)
def test_depths_and_losses_are_the_papers(name):
    module, batch, backend = case(name)
    num_depths = module.num_depths
    drafts = list(module.depths(batch, num_depths + 2))  # more than there are: as many as there are
    expected = literal(name, module, batch, backend, num_depths)
    assert len(drafts) == num_depths
    longest = batch.tokens_BL.shape[1]
    for draft, rows in zip(drafts, expected, strict=True):
        assert draft.anchors.tolist() == [index * longest + t for index, t, _, _ in rows]
        torch.testing.assert_close(draft.logits_AU, torch.stack([logits for *_, logits, _ in rows]), atol=1e-9, rtol=0)
    for loss in ("kl", "ce", "tv"):
        total = 0.0
        for depth, rows in enumerate(expected):
            losses = []
            for index, t, logits, _ in rows:
                target = target_rows(batch, backend, index, t + 1 + depth)
                if int(target.argmax()) in IDS:
                    q, p = log_probabilities(logits), log_probabilities(target[IDS])
                    losses.append(LOSSES[loss](q, p))
            one = torch.stack(losses).mean() if losses else torch.zeros(())
            one = one * float(CASES[name][1].get("teacher_weight", 1))
            if "label_weight" in CASES[name][1]:
                said = [
                    -log_probabilities(logits)[IDS.index(TEXTS[index][t + 2 + depth])]
                    for index, t, logits, _ in rows
                    if TEXTS[index][t + 2 + depth] in IDS
                ]
                one = one + float(CASES[name][1]["label_weight"]) * torch.stack(said).mean()
            weight = CASES[name][1].get("feature_weight")
            if weight:
                gaps = [x - batch.taps["last_hidden"][index, t + 1 + depth].double() for index, t, _, x in rows]
                smooth = [torch.where(gap.abs() < 1, gap * gap / 2, gap.abs() - 0.5).mean() for gap in gaps]
                one = one + float(weight) * torch.stack(smooth).mean()
            total = total + 0.7**depth * one
        found = module.loss(batch, LossOptions(loss=loss, decay=0.7, num_depths=num_depths)).loss
        torch.testing.assert_close(found, total.to(found.dtype), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_padding_is_not_read(name):
    """What stands behind a text's end adds nothing to loss or gradient."""
    module, batch, _ = case(name)
    options = LossOptions(num_depths=module.num_depths)
    module.loss(batch, options).loss.backward()
    clean = {key: parameter.grad.clone() for key, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad()
    dirty, _, _ = case(name)
    taps = {tap: rows.clone() for tap, rows in batch.taps.items()}
    for rows in taps.values():
        for index, length in enumerate(batch.lengths_B):
            rows[index, length:] = 7.5
    dirty.loss(type(batch)(**{**vars(batch), "taps": taps}), options).loss.backward()
    for key, parameter in dirty.named_parameters():
        if key in clean:
            torch.testing.assert_close(parameter.grad, clean[key])


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite_at_a_cold_start_and_reach_every_weight(name):
    backend = tiny_backend(1, vocab_size=VOCAB, width=16, head_dim=4, mlp_width=24)
    method, changes = CASES[name]
    module = new_module(method, target_of(backend), changes, torch.tensor(IDS))
    batch = batch_of(backend, TEXTS, module.needs, PROMPTS)
    for loss in LOSSES:
        module.zero_grad()
        report = module.loss(batch, LossOptions(loss=loss, num_depths=module.num_depths))
        report.loss.backward()
        assert bool(torch.isfinite(report.loss))
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), (loss, key)


def test_medusa_and_gloeckle_begin_by_saying_what_the_target_says():
    for name in ("medusa", "hydra", "gloeckle"):
        backend = tiny_backend(1, vocab_size=VOCAB, width=16, head_dim=4, mlp_width=24)
        method, changes = CASES[name]
        module = new_module(method, target_of(backend), changes)
        batch = batch_of(backend, TEXTS, module.needs, PROMPTS)
        draft = next(module.depths(batch, 1))
        hidden = batch.taps["last_hidden"].flatten(0, 1)[draft.anchors].float()
        torch.testing.assert_close(draft.logits_AU, hidden @ backend.head_rows(torch.arange(VOCAB)).t())


def test_rank_accuracies_count_every_anchor():
    module, batch, backend = case("mlp")
    expected = literal("mlp", module, batch, backend, 3)
    found = rank_accuracies(module, [batch, batch], 5, 4)
    assert len(found) == 3
    for depth, rows in enumerate(expected):
        for rank in range(4):
            hits = 0
            for index, t, logits, _ in rows:
                best = int(target_rows(batch, backend, index, t + 1 + depth).argmax())
                hits += IDS[int(logits.argsort(descending=True)[rank])] == best
            assert found[depth][rank] == pytest.approx(hits / len(rows))


def test_medusa_2_joins_the_two_losses():
    module, batch, _ = case("medusa")
    heads = module.loss(batch, LossOptions(decay=0.8, num_depths=3))
    language = torch.tensor(2.5, dtype=torch.float64)
    for schedule, factor in (("constant", 1.0), ("linear", 0.25), ("sine", math.sin(math.pi / 8))):
        joint = joint_loss(language, heads, 0.25, schedule=schedule)
        assert float(joint.detach()) == pytest.approx(2.5 + 0.2 * factor * float(heads.loss.detach()))
    assert joint.requires_grad
    with pytest.raises(OptionError, match="unknown schedule"):
        joint_loss(language, heads, 0.25, schedule="cosine")
    with pytest.raises(OptionError, match="progress is 2"):
        joint_loss(language, heads, 2)


@pytest.mark.parametrize("prefix", ["false", "true"])
@pytest.mark.parametrize("changes", [{"dropout": "0.3"}, {"noise": "8"}], ids=lambda changes: next(iter(changes)))
def test_hydras_noise_is_of_training_alone_and_the_seeds(changes, prefix):
    backend = tiny_backend(1, vocab_size=VOCAB, width=16, head_dim=4, mlp_width=24)
    target, options = target_of(backend), LossOptions(num_depths=3)
    plain = new_module("hydra", target, {"num_depths": "3", "prefix": prefix})
    noisy = new_module("hydra", target, {"num_depths": "3", "prefix": prefix, **changes})
    batch = batch_of(backend, TEXTS, noisy.needs, PROMPTS)

    def loss_of(module, seed):
        torch.manual_seed(seed)
        return float(module.loss(batch, options).loss.detach())

    with torch.random.fork_rng(devices=[]):
        clean = loss_of(plain, 0)
        assert loss_of(noisy.train(), 1) == loss_of(noisy, 1) != loss_of(noisy, 2)
        assert clean != loss_of(noisy, 1)
        assert loss_of(noisy.eval(), 1) == loss_of(noisy, 2) == clean
        for draft, other in zip(noisy.depths(batch, 3), plain.depths(batch, 3), strict=True):
            assert torch.equal(draft.logits_AU, other.logits_AU)


def test_hydras_noise_is_as_large_as_said():
    """NEFTune: uniform with amplitude alpha / sqrt(length * width), on hidden states and on embeddings."""
    backend = tiny_backend(1, vocab_size=VOCAB, width=16, head_dim=4, mlp_width=24)
    module = new_module("hydra", target_of(backend), {"num_depths": "2", "noise": "8"})
    texts = [[index % VOCAB for index in range(start, start + 60)] for start in range(20)] + [[1, 2, 3, 4]] * 20
    batch = batch_of(backend, texts, module.needs)
    clean = dict(enumerate(module.eval().states(batch, 2)))
    with torch.random.fork_rng(devices=[]):
        noisy = dict(enumerate(module.train()._noisy_states(batch, 2)))
    for depth in range(2):
        for length in (60, 4):
            rows = batch.lengths_B[clean[depth][0] // 60] == length
            gaps = (noisy[depth][1] - clean[depth][1])[rows]
            limit = 8 / math.sqrt(length * 16)
            assert 0.9 * limit < float(gaps.abs().max()) <= limit * (1 + 1e-5)
            assert float(gaps.var()) == pytest.approx(limit**2 / 3, rel=0.2)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"dropout": "1"}, "dropout is 1.0"),
        ({"noise": "-1"}, "noise is -1.0"),
        ({"label_weight": "-1"}, "label_weight is -1.0"),
        ({"teacher_weight": "0"}, "both 0"),
    ],
)
def test_hydras_options_are_checked(changes, part):
    backend = tiny_backend(1, vocab_size=VOCAB, width=16, head_dim=4, mlp_width=24)
    with pytest.raises(OptionError, match=part):
        new_module("hydra", target_of(backend), changes)
