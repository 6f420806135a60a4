"""The student of a draft model: its rows, its loss, what it begins as, and the model directory that comes out."""

import json

import pytest
import torch

from draftsmith.core.losses import LOSSES, log_probabilities, loss_named
from draftsmith.drafters.checkpoint import load_module, save_module
from draftsmith.drafters.student import StudentModule, spread_evenly
from draftsmith.drafters.trainable import LossOptions
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import load_model
from draftsmith.errors import ModelFileError, OptionError, VocabularyError
from draftsmith.io.files import open_model
from draftsmith.models.backend import RowGroup
from draftsmith.models.tokenizer import Tokenizer
from draftsmith.training.corpus import vocabulary_digest
from tests.drafters import model_on_disk as disk
from tests.drafters.trained import fit, new_module
from tests.drafters.trained_fakes import batch_of
from tests.models.vocabularies import embedded, sentencepiece_data

TEXTS = [[3, 7, 1, 0, 19, 4, 4, 12, 6], [5, 5, 2, 13, 9], [1, 2]]
PROMPTS = [3, 1, 1]
SMALL = {"width": "16", "heads": "2", "mlp_width": "24"}


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    """A target of five layers on disk."""
    return disk.write_model(tmp_path_factory.mktemp("target") / "target", num_layers=5)


@pytest.fixture(scope="module")
def target(name):
    return disk.target_of(name)


def float64_logits(module, text):
    """The student's rows on the reference backend."""
    backend = module.writer()
    backend.cache.open(0)
    backend.cache.reserve(0, len(text))
    return backend.score([RowGroup(0, text, range(-1, len(text) - 1), 0)]).logits[0]


def shaken(module):
    """In float64, with weights large enough that laws differ from row to row."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in module.double().parameters():
            size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


def test_every_depth_is_the_row_before_the_drafted_token(target):
    module = shaken(new_module("draft_model", target, SMALL))
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    longest = batch.tokens_BL.shape[1]
    drafts = list(module.depths(batch, 4))
    for depth, draft in enumerate(drafts):
        expected = []
        for index, text in enumerate(TEXTS):
            logits = float64_logits(module.double(), text).double()
            for anchor in range(len(text)):
                if PROMPTS[index] <= anchor + 2 + depth < len(text):
                    expected.append((index * longest + anchor, logits[anchor + 1 + depth]))
        assert draft.anchors.tolist() == [anchor for anchor, _ in expected]
        if expected:
            rows = torch.stack([row for _, row in expected])
            torch.testing.assert_close(draft.logits_AU.detach(), rows, atol=1e-4, rtol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_counts_each_row_once(target, loss):
    """Literal float64: logits and laws whole, a mean over the rows that an answer's token follows."""
    module = shaken(new_module("draft_model", target, SMALL))
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    report = module.loss(batch, LossOptions(loss=loss, num_depths=4))
    report.loss.backward()
    found = {key: parameter.grad.clone() for key, parameter in module.named_parameters()}
    module.zero_grad()
    head = target.backend.head_rows(torch.arange(disk.VOCAB)).double()
    losses, hits, shared = [], [], []
    logits_BLV = module.model(batch.tokens_BL) @ module.model.embed_tokens.weight.t()
    for index, text in enumerate(TEXTS):
        for row in range(1, len(text) - 1):
            if row + 1 >= PROMPTS[index]:
                log_q = log_probabilities(logits_BLV[index, row])
                log_p = log_probabilities(head @ batch.taps["last_hidden"][index, row].double())
                losses.append(loss_named(loss)(log_q[None], log_p[None])[0])
                hits.append(float(log_q.argmax() == log_p.argmax()))
                shared.append(float(torch.minimum(log_p, log_q.detach()).exp().sum()))
    expected = torch.stack(losses).mean()
    expected.backward()
    torch.testing.assert_close(report.loss, expected, atol=1e-7, rtol=0)  # laws come in float32
    assert report.rows.tolist() == [len(losses)]
    assert float(report.accuracy[0]) == pytest.approx(sum(hits) / len(hits))
    assert float(report.overlap[0]) == pytest.approx(sum(shared) / len(shared), abs=1e-6)
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("changes", [SMALL, {}, {"tied": "false"}], ids=["small", "as wide", "untied"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_finite_at_a_cold_start(target, loss, changes):
    module = new_module("draft_model", target, changes)
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    report = module.loss(batch, LossOptions(loss=loss))
    report.loss.backward()
    assert bool(torch.isfinite(report.loss))
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None and bool(torch.isfinite(parameter.grad).all()), key


def test_a_fresh_student_is_sure_of_nothing(target):
    """With the target's own embedding it would repeat the last token, at a loss far above that of a flat law."""
    for changes in ({}, {"tied": "false"}, SMALL):
        module = new_module("draft_model", target, changes)
        batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
        flat = float(torch.log(torch.tensor(float(disk.VOCAB))))
        assert float(module.loss(batch, LossOptions(loss="ce")).loss.detach()) < flat + 1


def test_a_batch_without_a_row_teaches_nothing(target):
    module = new_module("draft_model", target, SMALL)
    batch = batch_of(target.backend, [[1, 2, 3]], prompt_len=3)
    report = module.loss(batch, LossOptions())
    assert float(report.loss.detach()) == 0 and report.rows.tolist() == [0]
    assert [len(draft.anchors) for draft in module.depths(batch, 3)] == [0, 0, 0]


# -- what it begins as --------------------------------------------------------------------------------


def test_layers_are_taken_at_even_distances():
    assert spread_evenly(2, 30) == [0, 29]
    assert spread_evenly(5, 9) == [0, 2, 4, 6, 8]
    assert spread_evenly(1, 4) == [0]
    assert spread_evenly(4, 4) == [0, 1, 2, 3]


def test_all_layers_of_the_target_are_the_target(target, name):
    module = new_module("draft_model", target, {"init": name})
    batch = batch_of(target.backend, TEXTS, prompt_len=PROMPTS)
    report = module.loss(batch, LossOptions())
    assert float(report.loss.detach()) == pytest.approx(0, abs=1e-5)
    assert report.accuracy.tolist() == [1.0]


def test_some_layers_of_a_model(target, name):
    module = new_module("draft_model", target, {"init": name, "layers": "3"})
    assert module.config.layers == [0, 2, 4]
    files = open_model(name)
    for own, theirs in enumerate([0, 2, 4]):
        key = "mlp.down_proj.weight"
        assert torch.equal(module.model.layers[own].get_parameter(key), files.load(f"model.layers.{theirs}.{key}"))


def test_a_sibling_may_be_padded_otherwise(target, tmp_path):
    for vocab_size in (disk.VOCAB + 7, disk.VOCAB - 1):  # the last token of the vocabulary is padding
        sibling = disk.write_model(tmp_path / f"{vocab_size}", seed=3, vocab_size=vocab_size, num_layers=1, width=16)
        module = new_module("draft_model", target, {"init": sibling})
        assert module.config.spec.vocab_size == disk.VOCAB
        assert module.config.spec.width == 16
        rows = open_model(sibling).load("lm_head.weight")
        common = min(disk.VOCAB, vocab_size)
        assert torch.equal(module.lm_head.weight[:common], rows[:common])


def test_a_windowed_model_keeps_the_kinds_of_its_layers(target, tmp_path):
    path = disk.write_model(tmp_path / "windowed", num_layers=4, qkv_bias=True)
    config = json.loads((tmp_path / "windowed" / "config.json").read_text())
    config |= {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
    (tmp_path / "windowed" / "config.json").write_text(json.dumps(config))
    module = new_module("draft_model", target, {"init": path, "layers": "2"})
    assert module.config.spec.layer_windows == (None, 6)


@pytest.mark.parametrize(
    ("changes", "kind", "part"),
    [
        ({"width": "30", "heads": "4"}, OptionError, "width 30 over 4 heads"),
        ({"width": "12", "heads": "4"}, OptionError, "even multiple"),
        ({"heads": "4", "kv_heads": "3"}, OptionError, "4 heads over 3 kv_heads"),
        ({"layers": "-1"}, OptionError, "layers is -1"),
        ({"layers": "9999"}, OptionError, "num_hidden_layers"),
        ({"init": "/nowhere/model"}, ModelFileError, "/nowhere/model"),
        ({"colour": "red"}, OptionError, "colour"),
    ],
    ids=lambda value: " ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, dict) else None,
)
def test_mistakes(target, changes, kind, part):
    with pytest.raises(kind, match=part) as caught:
        new_module("draft_model", target, changes)
    assert "\n" not in str(caught.value)


def test_mistakes_about_a_beginning(target, name, tmp_path):
    with pytest.raises(OptionError, match="width, tied cannot be chosen"):
        new_module("draft_model", target, {"init": name, "width": "16", "tied": "true"})
    with pytest.raises(OptionError, match=r"layers is 6; .* has 5"):
        new_module("draft_model", target, {"init": name, "layers": "6"})
    files = disk.tokenizer().as_files()
    swapped = json.loads(files["tokenizer.json"])
    ids = swapped["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    other = disk.write_model(tmp_path / "other", files={**files, "tokenizer.json": json.dumps(swapped)})
    with pytest.raises(VocabularyError, match="another vocabulary"):
        new_module("draft_model", target, {"init": other})
    with pytest.raises(OptionError, match="leave the draft vocabulary out"):
        new_module("draft_model", target, SMALL, torch.arange(10))


# -- on disk ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [SMALL, {"tied": "false"}, {"init": True, "layers": "2"}], ids=str)
def test_what_is_written_is_a_model(target, name, changes, tmp_path):
    changes = {**changes, "init": name} if "init" in changes else changes
    module = new_module("draft_model", target, changes)
    save_module(tmp_path / "out", "draft_model", module, name, target, {})
    model = load_model(str(tmp_path / "out"), backend="reference")
    assert vocabulary_digest(model.tokenizer) == vocabulary_digest(target.tokenizer)
    assert model.eos_ids == target.eos_ids
    model.backend.cache.open(0)
    model.backend.cache.reserve(0, 9)
    logits = model.backend.score([RowGroup(0, TEXTS[0], range(-1, 8), 0)]).logits[0]
    torch.testing.assert_close(logits, float64_logits(module, TEXTS[0]), atol=1e-5, rtol=0)
    again = load_module(tmp_path / "out", "draft_model", target)
    for key, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_other_engines_read_it_too(target, name, tmp_path):
    import transformers

    module = shaken(new_module("draft_model", target, {"init": name, "layers": "2"})).float()
    save_module(tmp_path / "out", "draft_model", module, name, target, {})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        logits = model(tokens).logits[0]
    torch.testing.assert_close(logits, float64_logits(module, TEXTS[0]), atol=1e-4, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "<|im_start|>hello wor 12<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == target.tokenizer.encode(text, special=True)


@pytest.mark.parametrize("kind", ["embedded", "sentencepiece", "no prefix", "samples"])
def test_a_tokenizer_is_read_back_from_its_files(kind):
    made = {
        "embedded": embedded,
        "sentencepiece": lambda: Tokenizer.from_data(sentencepiece_data()),
        "no prefix": lambda: Tokenizer.from_data(sentencepiece_data(add_space_prefix=False)),
        "samples": disk.tokenizer,
    }[kind]()
    files = made.as_files()
    again = Tokenizer.from_data(
        {
            "kind": "tokenizer.json",
            "source": "test",
            "json": files["tokenizer.json"],
            "config": json.loads(files["tokenizer_config.json"]),
            "eos_ids": sorted(made.eos_ids),
        }
    )
    assert (again.vocab_size, again.eos_ids, again.bos_id, again.add_bos) == (
        made.vocab_size,
        made.eos_ids,
        made.bos_id,
        made.add_bos,
    )
    assert again.special_tokens == made.special_tokens
    assert again.strips_leading_space == made.strips_leading_space
    for token in range(made.vocab_size):
        assert again.token_bytes(token) == made.token_bytes(token), token
        assert again.normalized_token_text(token) == made.normalized_token_text(token), token
    assert vocabulary_digest(again) == vocabulary_digest(made)
    for text in ("hello world 12", "  a  b", "<|im_start|>user\nhé<|im_end|>", "<tool>x<note>", ""):
        for special in (True, False):
            assert again.encode(text, special=special) == made.encode(text, special=special)


# -- through the engine -------------------------------------------------------------------------------

COUNT, PROMPT_LEN, ANSWER_LEN = 50, 6, 18


@pytest.fixture(scope="module")
def learned(target, name, tmp_path_factory):
    """Prompts, the target's greedy answers, and the directory of a student that knows them by heart."""
    noise = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 256, (PROMPT_LEN,), generator=noise).tolist() for _ in range(COUNT)]
    engine = Engine(load_model(name, backend="reference"), EngineSettings(drafter="none"))
    results = engine.generate(prompts, max_new_tokens=ANSWER_LEN, ignore_eos=True)
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
    module = new_module("draft_model", target, {"width": "64", "heads": "4", "mlp_width": "128", "layers": "1"})
    assert isinstance(module, StudentModule)
    batch = batch_of(target.backend, texts, prompt_len=PROMPT_LEN)
    fit(module, batch, 80, lr=1e-2, options=LossOptions(loss="ce"))
    path = tmp_path_factory.mktemp("student") / "student"
    save_module(path, "draft_model", module, name, target, {}, dtype=torch.bfloat16)
    return prompts, path, [text[PROMPT_LEN:] for text in texts]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_fifty_texts_are_learned(learned, name, backend):
    """First-position acceptance through the engine is at least 0.9, and the ids are the plain run's.

    On the native backend, whose 8-bit weights decide near ties otherwise, of the texts that are as they were learned.
    """
    prompts, path, answers = learned
    model = load_model(name, backend=backend)
    settings = EngineSettings(drafter=f"draft_model:model={path}", controller="fixed:num_draft=3")
    engine = Engine(model, settings, load=lambda other: load_model(other, backend=backend))
    wanted = engine.generate(prompts, max_new_tokens=ANSWER_LEN, ignore_eos=True, drafter="none")
    as_learned = [index for index, result in enumerate(wanted) if list(result.token_ids) == list(answers[index])]
    assert len(as_learned) == COUNT if backend == "reference" else len(as_learned) >= 5
    engine.take_events()
    results = engine.generate([prompts[index] for index in as_learned], max_new_tokens=ANSWER_LEN, ignore_eos=True)
    assert [result.token_ids for result in results] == [wanted[index].token_ids for index in as_learned]
    records = [record for record in engine.take_events().requests if record.drafted]
    share = sum(record.accepted > 0 for record in records) / len(records)
    assert share >= 0.9


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("tree", ["", ":tree=2x2x1"])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.9, "seed": 1, "n": 2}], ids=str
)
def test_ids_are_the_plain_runs(learned, name, backend, tree, params):
    """Chains and trees, prompts in chunks, batches, samples and reused prefixes."""
    prompts, path, _ = learned
    chosen = {"controller": "fixed:num_draft=5", "max_batch": 3, "chunk_rows": 7}
    model = load_model(name, backend=backend)
    engine = Engine(
        model,
        EngineSettings(drafter=f"draft_model:model={path}{tree}", **chosen),
        load=lambda other: load_model(other, backend=backend),
    )
    asked = {"max_new_tokens": ANSWER_LEN, "ignore_eos": True, **params}
    wanted = engine.generate(prompts[:6], drafter="none", **asked)
    for _turn in range(2):  # the second time every prompt has been seen
        results = engine.generate(prompts[:6], **asked)
        for result, plain in zip(results, wanted, strict=True):
            assert result.token_ids == plain.token_ids
            assert [sample.token_ids for sample in result.samples or ()] == [
                sample.token_ids for sample in plain.samples or ()
            ]
        assert sum(result.statistics.accepted_tokens for result in results) > 0
