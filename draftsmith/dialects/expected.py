"""Names and shapes of a native drafter's tensors, without its target and without memory.

Used before anything large is read or written: a module is made on PyTorch's "meta" device beside a backend that has
a spec and nothing else. Invariant: these are the names and shapes that `drafters.checkpoint` asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import check_taps, module_class
from draftsmith.models.backend import Backend, RowGroup, Scored
from draftsmith.models.spec import DecoderSpec


@final
class _Shapes(Backend):
    """A target's sizes in place of a target."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec

    def score(self, groups: Sequence[RowGroup], taps: frozenset[int | str] = frozenset()) -> Scored:
        raise AssertionError("a target of shapes alone cannot score")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a target of shapes alone cannot embed")

    def head_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(tokens), self.spec.width, device="meta")

    @property
    def weight_bytes(self) -> int:
        return 0


def expected_tensors(
    method: str, config: Any, spec: DecoderSpec, draft_ids: torch.Tensor | None
) -> Mapping[str, torch.Tensor]:
    """Tensors without contents by native name. `draft_ids`: as `DraftModule` takes them."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"a target of shapes alone cannot load {name}")

    target = TargetInfo(
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        eos_ids=frozenset(),
        tokenizer=None,
        load_model=refuse,
        make_drafter=refuse,
        backend=_Shapes(spec),
    )
    with torch.device("meta"):
        ids = None if draft_ids is None else torch.empty(len(draft_ids), dtype=torch.int64)
        module = module_class(method)(config, target, ids)
    check_taps(module, spec.num_layers, method)
    found: Mapping[str, torch.Tensor] = module.state_dict()
    return found
