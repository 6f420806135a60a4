"""Which backend runs a model, and how it is made: the one place that knows them apart.

Called by the engine's loading. Invariant: "auto" takes the native backend wherever it can serve the model;
a number format asked for by name means floats, and those are the reference backend's.
"""

from __future__ import annotations

import logging

import torch

from draftsmith.errors import OptionError
from draftsmith.models.backend import Backend
from draftsmith.models.native import NativeBackend, NativeOptions, usable_processors, why_not
from draftsmith.models.native_weights import Raw
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.weights import Load
from draftsmith.registry import BACKENDS, parse_selection, read_options

AUTO = "auto"
logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def check_choice(backend: str, dtype: str) -> None:
    """Raise `OptionError` for a backend, an option of it or a number format that does not exist."""
    if dtype not in (AUTO, *DTYPES):
        raise OptionError(f"unknown dtype {dtype!r}; known are {', '.join((AUTO, *DTYPES))}")
    if not isinstance(backend, str):
        raise OptionError(f"a backend is named by a string, got {backend!r}")
    name = backend.partition(":")[0]
    if name not in (AUTO, *BACKENDS):
        raise OptionError(f"unknown backend {name!r}; known are {', '.join((AUTO, *BACKENDS))}")
    if name == "native":
        native_options(backend)
        if dtype != AUTO:
            raise OptionError(
                f"dtype {dtype} is for the reference backend; the native one computes on integers, and "
                "native:cache=float32 says what it keeps keys and values in"
            )
    elif name != backend:
        raise OptionError(f"backend {name} has no options, got {backend!r}")


def native_options(backend: str) -> NativeOptions:
    """The options of `native[:key=value]*`. Raises `OptionError`."""
    selection = parse_selection(backend, BACKENDS, "backend")
    options: NativeOptions = read_options(NativeOptions, selection.options, f"backend {backend}")
    return options


def chosen_backend(spec: DecoderSpec, *, backend: str = AUTO, dtype: str = AUTO, device: str = "cpu") -> str:
    """The backend, with its options, that `open_backend` opens. Raises `OptionError`."""
    check_choice(backend, dtype)
    if backend != AUTO:
        return backend
    return "native" if dtype == AUTO and why_not(spec, device=device) is None else "reference"


def open_backend(
    spec: DecoderSpec,
    load: Load,
    raw: Raw,
    *,
    backend: str = AUTO,
    dtype: str = AUTO,
    device: str = "cpu",
    threads: int | None = None,
) -> tuple[str, Backend]:
    """Load a decoder on the backend asked for; returns the backend's name too.

    `backend`: "auto" or `NAME[:key=value]*`. `dtype`: "auto", or what the reference backend computes in.
    `load` and `raw` give a tensor as floats and as stored. Raises `UserError`s.
    """
    backend = chosen_backend(spec, backend=backend, dtype=dtype, device=device)
    name = backend.partition(":")[0]
    if name == "native":
        options = native_options(backend)
        threads = _useful(threads)
        return name, NativeBackend.from_weights(spec, load, raw=raw, options=options, device=device, threads=threads)
    floats = DTYPES["float32" if dtype == AUTO else dtype]
    return name, ReferenceBackend.from_weights(spec, load, dtype=floats, device=device, threads=threads)


def _useful(threads: int | None) -> int | None:
    """No more threads than processors: those of the native backend meet hundreds of times in a step."""
    processors = usable_processors()
    if threads is None or threads <= processors:
        return threads
    logger.warning(
        "%d threads were asked for; this process may use %d processors, one thread each", threads, processors
    )
    return processors
