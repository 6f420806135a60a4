"""At the limits of the native backend: numbers it cannot hold, rows that are not there, memory that is short.

Each test names a fault that was found; what is asked for wrongly is refused, and nothing is freed too early.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith import _native
from draftsmith.errors import CapacityError, OptionError, UnsupportedError
from draftsmith.models import native
from draftsmith.models.backend import RowGroup
from tests.models.fakes import tiny_backend
from tests.models.native_models import Model, feed, make_native

FIELDS: dict[str, Any] = {"head_dim": 16, "width": 32, "mlp_width": 32}


def make() -> native.NativeBackend:
    return make_native(Model(FIELDS))


def test_a_window_beyond_every_context_hides_nothing() -> None:
    """It was a cast that failed, told as a matter of threads."""
    rows = []
    for windows in ((None, None), (2**40, 2**31), (2**31 - 1, None)):
        backend = make_native(Model({**FIELDS, "layer_windows": windows}))
        backend.cache.open(0)
        rows.append(torch.cat([feed(backend, 0, part)[0] for part in ([1, 2, 3], [4] * 70)]))
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("value", [1e-60, 1e60])
@pytest.mark.parametrize("name", ["norm_eps", "attention_scale", "attention_cap", "logit_cap", "embedding_scale"])
def test_a_number_that_single_precision_cannot_hold_is_refused(name: str, value: float) -> None:
    """A cap of 1e-60 was none at all, one of 1e60 made every row NaN."""
    with pytest.raises(
        UnsupportedError, match=re.escape(f"make {name} {value}") + ", which single precision cannot hold"
    ):
        make_native(Model({**FIELDS, name: value}))


@pytest.mark.parametrize("first_logit", [-1, 3])
@pytest.mark.parametrize("make_backend", [make, tiny_backend])
def test_logits_of_rows_that_are_not_there(make_backend: Callable[[], Any], first_logit: int) -> None:
    """For a second group, a row too early was the first group's last."""
    backend = make_backend()
    for sequence in (0, 1):
        backend.cache.open(sequence)
        backend.cache.reserve(sequence, 2)
    with pytest.raises(AssertionError, match=f"from row {first_logit} on, of 2 rows"):
        backend.score([RowGroup(0, [1, 2], [-1, 0], 0), RowGroup(1, [1, 2], [-1, 0], first_logit)])


def test_an_interrupt_while_rotations_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder reads tables that Python holds: whatever it may still read must not be freed."""
    backend = make_native(Model({**FIELDS, "layer_windows": (None, 4)}))
    text = [place * place % 64 for place in range(600)]
    backend.cache.open(0)
    expected = feed(backend, 0, text[:500])[0]
    grow = native.cosines_and_sines
    calls = []

    def interrupted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return grow(*arguments)

    monkeypatch.setattr(native, "cosines_and_sines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        feed(backend, 0, text[500:])
    held = [np.full((4096, 8), np.nan, np.float32) for _ in range(64)]  # takes the place of what was freed
    backend.cache.open(1)
    assert torch.equal(feed(backend, 1, text[:500])[0], expected)
    del held


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    backend.cache.open(0)
    for num_rows in (1 << 50, 1 << 70):
        with pytest.raises(CapacityError, match=r"of \d+ tokens do not fit into memory"):
            backend.cache.reserve(0, num_rows)

    def nothing_left(*_: Any) -> Any:
        raise MemoryError

    backend.cache.reserve(0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", nothing_left)
        with pytest.raises(CapacityError, match="step of 1 rows does not fit"):
            backend.score([RowGroup(0, [1], [-1], 0)])
    monkeypatch.setattr(_native, "pack_floats", nothing_left)
    with pytest.raises(CapacityError, match="weights of this model do not fit"):
        make()


def test_threads_that_loading_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", none_left)
    with pytest.raises(OptionError, match="threads is 1: can't start new thread"):
        make()
