"""Quality section of `bench_native.py`: how far each arm's laws are from the same file's in float32.

The text is cut into chunks that are read on their own, and every chunk is settled before the next, so that memory
holds one chunk's logits per arm. Mean KL divergence of an arm from the reference (in nats, law by law), how often
both agree on the likeliest token, and perplexity. Invariant: all arms are judged on the same positions; the first
quarter of a chunk only gives context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from native_arms import Arm
from native_speed import say

from draftsmith.bench.prompts import load_prompts

_ROWS_AT_ONCE = 32


@dataclass(kw_only=True)
class _Sums:
    """What is added up for one arm."""

    loss: float = 0.0
    kls: list[float] = field(default_factory=list)
    agreed: int = 0
    positions: int = 0


def read_text(path: Path) -> str:
    """A text file, or the prompts of a .jsonl file one after another."""
    if path.suffix == ".jsonl":
        return "\n\n".join(prompt.text for prompt in load_prompts(path))
    return path.read_text(encoding="utf-8")


def quality(arms: Sequence[Arm], reference: Arm, ids: list[int], num_tokens: int, chunk: int) -> dict[str, Any]:
    """Judge every arm on the first `num_tokens` tokens."""
    able = [reference, *arms]
    sums = {arm.name: _Sums() for arm in able}
    for start in range(0, min(num_tokens, len(ids)) - chunk + 1, chunk):
        part = ids[start : start + chunk]
        say(f"    tokens {start} to {start + chunk}")
        own = torch.from_numpy(np.asarray(reference.logits(part)))
        _add(sums[reference.name], own, own, part)
        for arm in able[1:]:
            try:
                theirs = arm.logits(part)
            except NotImplementedError:
                sums.pop(arm.name, None)
            else:
                _add(sums[arm.name], own, torch.from_numpy(theirs), part)
    return _result(sums, reference.name, chunk)


def _add(sums: _Sums, own_RV: torch.Tensor, their_RV: torch.Tensor, ids: list[int]) -> None:
    for start in range(len(ids) // 4, len(ids) - 1, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, len(ids) - 1)
        own = torch.log_softmax(own_RV[start:end].double(), dim=-1)
        their = torch.log_softmax(their_RV[start:end, : own.shape[1]].double(), dim=-1)
        targets = torch.tensor(ids[start + 1 : end + 1])[:, None]
        sums.loss -= float(their.gather(1, targets).sum())
        sums.kls += (own.exp() * (own - their)).sum(dim=-1).tolist()
        sums.agreed += int((own.argmax(-1) == their.argmax(-1)).sum())
        sums.positions += end - start


def _result(sums: dict[str, _Sums], reference: str, chunk: int) -> dict[str, Any]:
    arms: dict[str, dict[str, float]] = {}
    lines = [f"{'arm':34} {'mean KL':>10} {'KL 99 %':>10} {'same top token':>15} {'perplexity':>11}"]
    for name, found in sums.items():
        if not found.positions:
            continue
        arms[name] = {
            "kl": float(np.mean(found.kls)),
            "kl_standard_error": float(np.std(found.kls) / math.sqrt(len(found.kls))),
            "kl_99": float(np.quantile(found.kls, 0.99)),
            "agreement": found.agreed / found.positions,
            "perplexity": math.exp(found.loss / found.positions),
        }
        row = arms[name]
        lines.append(
            f"{name:34} {row['kl']:10.5f} {row['kl_99']:10.4f} {row['agreement']:14.2%} {row['perplexity']:11.3f}"
        )
    positions = sums[reference].positions
    return {"arms": arms, "positions": positions, "chunk": chunk, "table": [*lines, f"{positions} positions"]}
