"""Trained drafters for tests: a training loop of ten lines, checkpoints for the toy.

`toy_directory(name)` is a checkpoint for the Markov target of `loop.py`, trained on first use; selections name it
`path=toy/NAME`, so that test names do not depend on where it lies.
"""

import functools
import tempfile
from pathlib import Path

import torch

from draftsmith.drafters.checkpoint import module_class, save_module
from draftsmith.drafters.rank_accuracy import KEY, rank_accuracies
from tests.drafters.trained_fakes import batch_of


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
# On disk Medusa-2 is heads beside a tuned target; the toy has no weights to tune.
_TUNED = {"medusa2": ("medusa", {"head": "own", "num_layers": "2"}, None)}


@functools.cache
def _toy_root():
    directory = tempfile.TemporaryDirectory(prefix="toy-drafters-")
    return directory  # removed at the end of the process


@functools.cache
def toy_directory(name):
    """The checkpoint of a toy."""
    from tests.drafters import loop

    method, changes, draft_ids = {**TOYS, **_TUNED}[name]
    target = loop.target_info({})
    ids = None if draft_ids is None else torch.tensor(draft_ids)
    module = new_module(method, target, changes, ids)
    texts = loop.texts_of(target.backend, 24, 24, seed=5)
    batch = batch_of(target.backend, texts, module.needs)
    fit(module, batch, 120 if method == "eagle3" else 60, lr=2e-2)
    accuracies = rank_accuracies(module, [batch], 4, 4)
    path = Path(_toy_root().name) / name
    save_module(path, name if name in _TUNED else method, module, "toy", target, {KEY: accuracies})
    return path


@functools.cache
def toy_student():
    """The toy's own draft model, trained; each `writer()` of it is a model with a cache of its own."""
    from tests.drafters import loop

    target = loop.target_info({})
    module = new_module("draft_model", target, {"width": "16", "heads": "2", "mlp_width": "32", "layers": "1"})
    fit(module, batch_of(target.backend, loop.texts_of(target.backend, 24, 24, seed=5)), 80, lr=2e-2)
    return module


def resolved(text):
    """A selection with its toys' real paths."""
    head, found, rest = text.partition("path=toy/")
    if not found:
        return text
    name, colon, rest = rest.partition(":")
    return f"{head}path={toy_directory(name)}{colon}{resolved(rest)}"
