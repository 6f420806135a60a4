"""Trained drafters for tests: batches of any backend's texts, a training loop of ten lines, checkpoints for the toy.

`toy_directory(name)` is a checkpoint for the Markov target of `loop.py`, trained on first use; selections name it
`path=toy/NAME`, so that test names do not depend on where it lies.
"""

import functools
import tempfile
from pathlib import Path

import torch

from draftsmith.drafters.checkpoint import module_class, save_module
from draftsmith.drafters.rank_accuracy import KEY, rank_accuracies
from draftsmith.drafters.trainable import TrainingBatch
from draftsmith.models.backend import RowGroup


def batch_of(backend, texts, prompt_lens, needs=frozenset()):
    """A batch of whole texts, all tokens from `prompt_lens` on being answers."""
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    answer = torch.zeros(len(texts), longest, dtype=torch.bool)
    best, log_total = torch.zeros_like(tokens), torch.zeros(len(texts), longest)
    taps = {}
    for index, (text, prompt_len) in enumerate(zip(texts, prompt_lens, strict=True)):
        size, sequence_id = len(text), 10_000 + index
        backend.cache.open(sequence_id)
        backend.cache.reserve(sequence_id, size)
        scored = backend.score([RowGroup(sequence_id, text, range(-1, size - 1), 0)], needs | {"last_hidden"})
        backend.cache.close(sequence_id)
        tokens[index, :size] = torch.tensor(text)
        answer[index, prompt_len:size] = True
        best[index, :size] = scored.logits[0].argmax(-1)
        log_total[index, :size] = scored.logits[0].logsumexp(-1)
        for tap, rows in scored.taps[0].items():
            room = taps.setdefault(tap, torch.zeros(len(texts), longest, rows.shape[-1], dtype=rows.dtype))
            room[index, :size] = rows
    return TrainingBatch(
        tokens_BL=tokens,
        lengths_B=torch.tensor([len(text) for text in texts]),
        answer_BL=answer,
        taps=taps,
        best_BL=best,
        log_total_BL=log_total,
    )


def new_module(method, target, changes=None, draft_ids=None, seed=0):
    """A module as the trainer starts it."""
    kind = module_class(method)
    module = kind(kind.configure(target, changes or {}), target, draft_ids)
    module.initialise(target, torch.Generator().manual_seed(seed))
    return module


def fit(module, batch, steps, lr=3e-3, options=None):
    """Adam on one batch; the last loss."""
    options = options or module.loss_defaults
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 20)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module.loss(batch, options).loss
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


# EAGLE-3 reads the token through its attention alone, and the toy's own head has two numbers.
_SIX_HEADS = {"num_heads": "6", "num_kv_heads": "6"}
TOYS = {
    "medusa": ("medusa", {"num_layers": "2"}, None),
    "medusa-own": ("medusa", {"head": "own", "num_depths": "3"}, [0, 1, 2, 3, 5, 7, 8, 10, 11]),
    "hydra": ("hydra", {"num_depths": "3", "num_layers": "2"}, None),
    "hydra++": ("hydra", {"prefix": "true", "head": "own", "num_depths": "3"}, [0, 1, 2, 4, 5, 6, 9, 11]),
    "mlp": ("mlp_speculator", {"inner_width": "16"}, None),
    "mlp-untied": ("mlp_speculator", {"tied": "false", "num_depths": "2", "scale_input": "false"}, list(range(9))),
    "gloeckle": ("gloeckle", {}, None),
    "eagle1": ("eagle1", {"noise": "0.01", "fc_bias": "true"}, None),
    "eagle1-few": ("eagle1", {"noise": "0"}, [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]),
    "eagle3": ("eagle3", _SIX_HEADS, [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]),
    "eagle3.1": (
        "eagle3",
        {**_SIX_HEADS, "norm_output": "true", "tap_norm": "true", "norm_before_residual": "true"},
        None,
    ),
    "mtp": ("mtp", {}, None),
    "mtp-mimo": ("mtp", {"variant": "mimo"}, [0, 1, 2, 4, 5, 6, 9, 11]),
    "gloeckle-own": ("gloeckle", {"head": "own", "num_depths": "2"}, [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]),
}
"""Name -> method, changes of its configuration, draft vocabulary."""


@functools.cache
def _toy_root():
    directory = tempfile.TemporaryDirectory(prefix="toy-drafters-")
    return directory  # removed at the end of the process


@functools.cache
def toy_directory(name):
    """The checkpoint of a toy."""
    from tests.drafters import loop

    method, changes, draft_ids = TOYS[name]
    target = loop.target_info({})
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    module = new_module(method, target, changes, ids)
    texts = loop.texts_of(target.backend, 24, 24, seed=5)
    batch = batch_of(target.backend, texts, [1] * len(texts), module.needs)
    fit(module, batch, 120 if method == "eagle3" else 60, lr=2e-2)
    accuracies = rank_accuracies(module, [batch], 4, 4)
    path = Path(_toy_root().name) / name
    save_module(path, method, module, "toy", target, {KEY: accuracies})
    return path


def resolved(text):
    """A selection with its toys' real paths."""
    head, found, rest = text.partition("path=toy/")
    if not found:
        return text
    name, colon, rest = rest.partition(":")
    return f"{head}path={toy_directory(name)}{colon}{resolved(rest)}"
