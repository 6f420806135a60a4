"""From a name to a model that can score: files, decoder, tokenizer, chat template.

Called by the engine for the target and, handed to drafters as an argument, for standalone draft models.
This is where `io` and `models`, which do not know each other, are put together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.core.machine import processor_name
from draftsmith.errors import OptionError
from draftsmith.io.files import ModelFiles, open_model
from draftsmith.io.fingerprint import file_facts
from draftsmith.models.backend import Backend
from draftsmith.models.chat import ChatTemplate
from draftsmith.models.choice import check_choice, chosen_backend, open_backend
from draftsmith.models.native import usable_processors
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.tokenizer import Tokenizer

# PyTorch starts them all at once and dies where the system has no more; no machine gains from this many.
_MAX_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to score. `chat` is None when its files hold no chat template. `identity`: what costs measured with
    it belong to (what the files hold, wherever they lie, backend, threads, processor); empty for a model without files.
    """

    name: str
    backend_name: str
    backend: Backend
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    eos_ids: frozenset[int]
    identity: Mapping[str, Any] = field(default_factory=dict)


def default_memory_bytes() -> int:
    """Half of the memory that is free now: what caches may take when nobody says otherwise."""
    try:
        with Path("/proc/meminfo").open() as lines:
            available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return available // 2


def load_model(
    name: str, *, backend: str = "auto", dtype: str = "auto", threads: int | None = None, device: str = "cpu"
) -> LoadedModel:
    """Load a model by catalogue name, directory, file or hub id. Raises `UserError`s."""
    found = _find(name, backend=backend, dtype=dtype, threads=threads, device=device)
    files = found.files
    tokenizer = Tokenizer.from_data(files.tokenizer)
    backend_name, opened = open_backend(
        found.spec, files.load, files.raw, backend=backend, dtype=dtype, device=device, threads=threads
    )
    template = files.chat_template
    return LoadedModel(
        name=name,
        backend_name=backend_name,
        backend=opened,
        tokenizer=tokenizer,
        chat=ChatTemplate(template, tokenizer.special_tokens) if template else None,
        eos_ids=files.eos_ids | tokenizer.eos_ids,
        identity=found.identity,
    )


def model_identity(
    name: str, *, backend: str = "auto", dtype: str = "auto", threads: int | None = None, device: str = "cpu"
) -> Mapping[str, Any]:
    """The `identity` that `load_model` would give, without reading weights. Raises `UserError`s."""
    return _find(name, backend=backend, dtype=dtype, threads=threads, device=device).identity


class _Found(NamedTuple):
    """A model whose weights have not been read."""

    files: ModelFiles
    spec: DecoderSpec
    identity: Mapping[str, Any]


def _find(name: str, *, backend: str, dtype: str, threads: int | None, device: str) -> _Found:
    if not isinstance(name, str):
        raise OptionError(f"a model is named by a string (catalogue name, directory or file), got {name!r}")
    if threads is not None and (
        not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= _MAX_THREADS
    ):
        raise OptionError(
            f"threads must be None or a whole number, at least 1 and at most {_MAX_THREADS}, got {threads!r}"
        )
    check_choice(backend, dtype)
    files = open_model(name)
    spec = DecoderSpec.from_config(files.config)
    identity = {
        **file_facts(files.path),
        "backend": chosen_backend(spec, backend=backend, dtype=dtype, device=device),
        "dtype": dtype,
        "device": device,
        "threads": threads or usable_processors(),
        "processor": processor_name(),
    }
    return _Found(files, spec, identity)
