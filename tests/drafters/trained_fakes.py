"""Modules with random weights, their checkpoints, and training batches of a tiny target."""

import tempfile
from pathlib import Path

import torch

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import module_class, save_module
from draftsmith.drafters.trainable import TrainingBatch
from draftsmith.models.backend import RowGroup

_FOLDER = tempfile.TemporaryDirectory(prefix="draftsmith-tests-")
_SCORED = 1 << 40  # sequence ids nobody else has


def info_of(backend, eos_ids=frozenset()):
    """A target for drafters that ask for nothing but its backend."""
    return TargetInfo(
        vocab_size=backend.spec.vocab_size,
        max_context=backend.spec.max_context,
        eos_ids=eos_ids,
        tokenizer=None,
        load_model=None,
        make_drafter=None,
        backend=backend,
    )


def random_module(method, info, changes=None, draft_ids=None, dtype=torch.float32, seed=0, noise=1.0):
    """A module whose laws differ clearly from row to row; norms and biases are random too (`noise` 0: a cold start)."""
    kind = module_class(method)
    module = kind(kind.configure(info, changes or {}), info, draft_ids)
    generator = torch.Generator().manual_seed(seed)
    module.initialise(info, generator)
    with torch.no_grad():
        for parameter in module.parameters():
            size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1
            parameter += noise * size * torch.randn(parameter.shape, generator=generator)
    return module.to(dtype).eval().requires_grad_(False)


def checkpoint_of(method, module, info, name="drafter"):
    """A module's directory, under the tests' own temporary folder."""
    path = Path(_FOLDER.name) / name
    save_module(path, method, module, "tiny", info, {})
    return path


def random_checkpoint(method, info, changes=None):
    """The directory of a random module that drafts all tokens but two."""
    size = info.vocab_size
    name = f"{method}-{size}-{'-'.join((changes or {}).values())}"
    path = Path(_FOLDER.name) / name
    if not path.exists():
        ids = torch.tensor([token for token in range(size) if token not in (4, size - 3)])
        checkpoint_of(method, random_module(method, info, changes, ids), info, name)
    return path


def batch_of(backend, texts, taps=frozenset(), prompt_len=1):
    """What the frozen target makes of whole texts; tokens from `prompt_len` (or each text's own) on are answers."""
    longest = max(map(len, texts))
    prompt_lens = [prompt_len] * len(texts) if isinstance(prompt_len, int) else prompt_len
    rows, logits = {tap: [] for tap in {*taps, "last_hidden"}}, []
    for index, text in enumerate(texts):
        cache, sequence_id = backend.cache, _SCORED + index
        cache.open(sequence_id)
        cache.reserve(sequence_id, len(text))
        scored = backend.score([RowGroup(sequence_id, list(text), range(-1, len(text) - 1), 0)], frozenset(rows))
        cache.keep(sequence_id, range(len(text)))
        cache.close(sequence_id)
        for tap, found in rows.items():
            found.append(_padded(scored.taps[0][tap], longest))
        logits.append(_padded(scored.logits[0], longest))
    lengths, starts = torch.tensor([len(text) for text in texts]), torch.tensor(prompt_lens)
    places = torch.arange(longest)
    return TrainingBatch(
        tokens_BL=torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts]),
        lengths_B=lengths,
        answer_BL=(places >= starts[:, None]) & (places < lengths[:, None]),
        taps={tap: torch.stack(found).clone() for tap, found in rows.items()},
        best_BL=torch.stack(logits).argmax(dim=-1),
        log_total_BL=torch.logsumexp(torch.stack(logits), dim=-1),
    )


def _padded(rows, longest):
    return torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows)))
