"""A tiny target, its own greedy answers as a corpus, and a drafter to train on them."""

import dataclasses
from types import SimpleNamespace

import torch

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.eagle3 import Eagle3Module
from draftsmith.drafters.trainable import TrainableDrafter
from draftsmith.models.backend import RowGroup
from draftsmith.training.corpus import CorpusTarget, CorpusWriter, vocabulary_digest
from draftsmith.training.processes import Processes
from draftsmith.training.run import prepare
from draftsmith.training.settings import TrainingSettings
from tests.models.fakes import tiny_backend

VOCAB = 64
METHOD = "tests.training.tiny:TinyEagle"
BROKEN = "tests.training.tiny:BrokenEagle"


class TinyEagle(TrainableDrafter):
    """EAGLE-3 as far as the trainer looks."""

    Module = Eagle3Module


class BrokenModule(Eagle3Module):
    """Its loss is NaN from the third batch on."""

    seen = 0

    def loss(self, batch, options):
        found = super().loss(batch, options)
        self.seen += 1
        return found if self.seen < 3 else dataclasses.replace(found, loss=found.loss * float("nan"))


class BrokenEagle(TinyEagle):
    """A drafter whose training goes wrong."""

    Module = BrokenModule


class Letters:
    """A tokenizer, as far as the trainer looks."""

    vocab_size = VOCAB

    def token_text(self, token):
        return f"t{token}"

    def is_special(self, token):
        return token == 0


LETTERS = Letters()


def target_of(backend, eos_ids=frozenset({0})):
    """What a drafter may know of a target."""
    return TargetInfo(
        vocab_size=backend.spec.vocab_size,
        max_context=backend.spec.max_context,
        eos_ids=eos_ids,
        tokenizer=LETTERS,
        load_model=lambda name: SimpleNamespace(backend=backend),
        make_drafter=None,
        backend=backend,
    )


def greedy(backend, prompt, num_tokens):
    """The target's own answer."""
    cache, tokens, fed = backend.cache, list(prompt), 0
    sequence_id = max(cache.sequence_ids, default=-1) + 1
    cache.open(sequence_id)
    for _ in range(num_tokens):
        rows = tokens[fed:]
        cache.reserve(sequence_id, len(rows))
        scored = backend.score([RowGroup(sequence_id, rows, range(-1, len(rows) - 1), len(rows) - 1)])
        cache.keep(sequence_id, range(len(rows)))
        fed = len(tokens)
        tokens.append(int(scored.logits[0][-1].argmax()))
    cache.close(sequence_id)
    return tokens


def write_corpus(path, backend, num_texts=12, seed=0, tokenizer=LETTERS):
    """Answers of 8 to 24 tokens to random prompts, as texts on disk."""
    random = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    target = CorpusTarget(name="tiny", vocab_size=VOCAB, tokenizer=vocabulary_digest(tokenizer))
    writer = CorpusWriter(path, target)
    for _ in range(num_texts):
        length = int(torch.randint(3, 9, (), generator=random))
        prompt = torch.randint(1, VOCAB, (length,), generator=random).tolist()
        answer_len = int(torch.randint(8, 25, (), generator=random))
        tokens = greedy(backend, prompt, answer_len)
        writer.add(tokens, [place >= length for place in range(len(tokens))])
    writer.finish()
    return path


def write_data(path, backend):
    """A corpus with one to validate on."""
    write_corpus(path, backend)
    write_corpus(path / "validation", backend, num_texts=4, seed=1)
    return path


def settings_of(data, output, **changes):
    """A run of a few steps."""
    values = {
        "method": METHOD,
        "model": "tiny",
        "data": data,
        "output": output,
        "configure": {"taps": "0-1-2"},
        "draft_vocab": 48,
        "steps": 8,
        "depths": 3,
        "batch_tokens": 80,
        "compute": "float32",
        "lr": 1e-2,
        "save_every": 1e-9,
        **changes,
    }
    return TrainingSettings(**values)


def job_of(data, output, backend=None, together=None, identity=None, **changes):
    """Everything ready for a run over the tiny target."""
    backend = backend or tiny_backend(0, dtype=torch.float32)
    return prepare(settings_of(data, output, **changes), target_of(backend), together or Processes(), identity)
