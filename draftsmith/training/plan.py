"""What a run will take, before it starts: parameters, disk, memory, time.

Called by `cli.train --plan`. Times come from a few real steps on the run's own batches, fewer where one takes long;
nothing is written and no weight changes. Invariant: an estimate says what it rests on.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.training.on_policy import OnPolicyFeatures, is_rewritten
from draftsmith.training.processes import Processes
from draftsmith.training.run import Job
from draftsmith.training.trainer import loss_options

_TRIAL_BATCHES = 3
_TRIAL_SECONDS = 20.0  # after which no further batch is begun
_STATE_BYTES_PER_WEIGHT = 12
"""Weight, first and second moment, in float32."""
_WEIGHT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes, seconds and counts of a run. `seconds` excludes validations; `cache_seconds` is filling the cache once;
    `tried`: steps that times come from. `steps` is None where seconds alone end the run.
    """

    parameters: int
    texts: int
    text_tokens: int
    left_out: int
    steps: int | None
    trained_tokens: int
    drafter_bytes: int
    state_bytes: int
    cache_bytes: int
    memory_bytes: int
    tokens_per_second: float
    feature_tokens_per_second: float
    seconds: float
    cache_seconds: float
    written_tokens: int
    writing_tokens_per_second: float
    tried: int

    def lines(self) -> list[tuple[str, str]]:
        """What to print."""
        steps = "as many as the time allows: about" if self.steps is None else f"{self.steps:,} over"
        found = [
            ("trained parameters", f"{self.parameters:,}"),
            ("texts", f"{self.texts:,} with {self.text_tokens:,} tokens; {self.left_out:,} left out"),
            ("steps", f"{steps} {self.trained_tokens:,} tokens"),
            ("disk", f"drafter {_size(self.drafter_bytes)}, state {_size(self.state_bytes)}, "
                     f"cache {_size(self.cache_bytes)}"),
            ("memory", f"{_size(self.memory_bytes)} at the peak of {self.tried} trial steps"),
            ("speed", f"{self.tokens_per_second:,.0f} tokens/s training, {self.feature_tokens_per_second:,.0f} "
                      "tokens/s scoring by the target"),
        ]  # fmt: skip
        if self.cache_seconds:
            found.append(("filling the cache", _duration(self.cache_seconds)))
        if self.written_tokens:
            rate = self.writing_tokens_per_second
            found.append(
                ("own answers", f"{self.written_tokens:,} tokens at {rate:,.0f} tokens/s, in the time of training")
            )
        found.append(("training", _duration(self.seconds)))
        return found

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return dict(vars(self))


def make_plan(job: Job) -> Plan:
    """Time a few steps and work out the rest."""
    settings, module = job.settings, job.module
    scoring, training, tokens, tried = _trial(job)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    num_tokens = sum(int(job.corpus.lengths[index]) for index in job.kept)
    per_batch = num_tokens / max(1, job.order.num_batches(1))
    training_rate, feature_rate = tokens / training, tokens / scoring
    cached = settings.cache is not None
    # Texts that the drafter writes itself are scored when they are there, cache or not.
    scored = settings.on_policy if cached else 1.0
    written, writing_rate = _writing(job)
    each = 1 / training_rate + scored / feature_rate + written / writing_rate
    limits = []
    if settings.steps is not None:
        limits.append(settings.steps * settings.accumulate * per_batch)
    if settings.num_passes is not None:
        limits.append(num_tokens * settings.num_passes)
    has_steps = bool(limits)
    if settings.max_seconds is not None:
        limits.append(settings.max_seconds / each)
    trained = int(min(limits))
    row_bytes = 2 * job.target.backend.spec.width * len(module.needs | {"last_hidden"}) + 8
    return Plan(
        parameters=parameters,
        texts=len(job.kept),
        text_tokens=num_tokens,
        left_out=len(job.corpus) - len(job.kept),
        steps=job.num_steps if has_steps else None,
        trained_tokens=trained,
        drafter_bytes=_written_weights(job) * _WEIGHT_BYTES[settings.dtype],
        # The new state stands beside the old one while it is written.
        state_bytes=parameters * (2 * _STATE_BYTES_PER_WEIGHT + 4),
        cache_bytes=num_tokens * row_bytes if cached else 0,
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 8 * parameters,
        tokens_per_second=training_rate,
        feature_tokens_per_second=feature_rate,
        seconds=trained * each,
        cache_seconds=num_tokens / feature_rate if cached else 0.0,
        written_tokens=int(trained * written),
        writing_tokens_per_second=writing_rate,
        tried=tried,
    )


def _written_weights(job: Job) -> int:
    """Weights on disk in the end: a method that tunes its target writes all of that."""
    module = job.module
    own = [(module.part_of(name), parameter.numel()) for name, parameter in module.named_parameters()]
    if not module.tunes_target:
        return sum(size for _, size in own)
    return sum(size for part, size in own if not part) + job.target.backend.spec.num_parameters


def _writing(job: Job) -> tuple[float, float]:
    """Tokens that the drafter will write itself per token trained, and how many it writes a second."""
    settings = job.settings
    if not settings.on_policy:
        return 0.0, 1.0
    numbers = [number for number in range(1 << 12) if is_rewritten(number, settings.on_policy)][:_TRIAL_BATCHES]
    source = OnPolicyFeatures(job.online, settings, job.module, job.order, job.scorer, job.target.eos_ids, Processes())
    began = time.perf_counter()
    texts = source.write(numbers, lambda: False) or {}
    seconds = time.perf_counter() - began
    answers = sum(int(text.answer.sum()) for batch in texts.values() for text in batch)
    whole = sum(int(job.corpus.answer(index).sum()) for index in job.kept)
    per_token = whole / max(1, sum(int(job.corpus.lengths[index]) for index in job.kept))
    return settings.on_policy * per_token, max(1, answers) / seconds


def _trial(job: Job) -> tuple[float, float, int, int]:
    """Seconds of scoring, seconds of training, tokens and number of a few batches, after one text that warms up."""
    settings, options = job.settings, loss_options(job.settings, job.module)
    scoring = training = 0.0
    tokens = tried = 0
    for number in range(_TRIAL_BATCHES + 1):
        indices = job.order.batch(number)
        began = time.perf_counter()
        batch = job.online.batch(indices if number else indices[:1])
        scored = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.compute == "bfloat16"):
            loss = job.module.loss(batch, options).loss
        if loss.requires_grad:
            loss.backward()
        ended = time.perf_counter()
        if number:
            scoring, training = scoring + scored - began, training + ended - scored
            tokens, tried = tokens + int(batch.lengths_B.sum()), number
        if scoring + training > _TRIAL_SECONDS:
            break
    job.module.zero_grad(set_to_none=True)
    return scoring, training, tokens, tried


def _size(number: int) -> str:
    size = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
