"""The training loop: batches in order, one loss, one optimiser, states on disk, validations.

Called by `cli.train` through `training.run`; knows no drafter, only `DraftModule`. Invariants: a run that was
stopped anywhere and continued has, bit for bit, the losses of one that was not; a step is taken whole or not at
all; nothing that is not finite gets into the weights or onto the disk.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch

from draftsmith.core.losses import LossReport
from draftsmith.drafters.trainable import DraftModule, LossOptions
from draftsmith.errors import DraftsmithError, OptionError
from draftsmith.training.batches import BatchOrder
from draftsmith.training.features import FeatureSource
from draftsmith.training.optimiser import make_optimiser, rate_factor
from draftsmith.training.processes import Processes
from draftsmith.training.settings import TrainingSettings
from draftsmith.training.state import (
    BEST,
    LAST,
    best_fits,
    last_state,
    read_state,
    remove_leftovers,
    restore,
    training_tensors,
    write_state,
)
from draftsmith.training.validation import Figures, Tally, as_plain, judge_batches


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step. `loss`, `accuracy`, `overlap`: means over its rows; `tokens`: of its texts; `rate`: learning rate."""

    step: int
    loss: float
    accuracy: tuple[float, ...]
    overlap: tuple[float, ...]
    rows: int
    tokens: int
    gradient: float
    rate: float
    seconds: float
    feature_seconds: float


@dataclass(kw_only=True)
class Progress:
    """How far a run is: what a state keeps beside tensors. `seconds` spent training, over all its lives."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = -1
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who hears what a run does: progress lines, logs. `stop`: asked after each batch whether to stop."""

    on_step: Callable[[StepReport, Progress, int], None] = lambda report, progress, num_steps: None
    on_validation: Callable[[Figures, Progress], None] = lambda figures, progress: None
    on_save: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = lambda: False


@final
class Trainer:
    """One run over one module."""

    def __init__(
        self,
        settings: TrainingSettings,
        module: DraftModule,
        source: FeatureSource,
        order: BatchOrder,
        validation: tuple[FeatureSource, Sequence[Sequence[int]]] | None,
        together: Processes,
        identity: Mapping[str, Any],
    ) -> None:
        """`validation`: a source and the batches of it to validate on; `identity`: what a state has of this run."""
        self.settings = settings
        self.module = module
        self.options = loss_options(settings, module)
        self.progress = Progress()
        self.num_steps = count_steps(settings, order)
        self._source = source
        self._order = order
        self._num_batches = None if settings.num_passes is None else order.num_batches(settings.num_passes)
        self._validation = validation
        self._together = together
        self._identity = identity
        self._optimiser = make_optimiser(module, settings.lr, settings.weight_decay, module.part_of)
        self._since_save = 0.0

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        limit = self.settings.max_seconds
        return self.progress.step >= self.num_steps or (limit is not None and self.progress.seconds >= limit)

    def run(self, listener: Listener) -> bool:
        """Train until the end or until asked to stop; returns whether the end was reached.

        Raises `DraftsmithError` when loss, weights or drafts are not finite or a state cannot be written.
        """
        while not self._together.any_of(self.finished):
            before = self._done
            report = self.step(listener.stop)
            if report is None:
                self.save(listener)
                return False
            if self._together.is_first:
                listener.on_step(report, self.progress, self.num_steps)
            if self._validation is not None and self._validation_is_due(before):
                self.validate(listener)
            self._since_save += report.seconds
            if self._together.any_of(self._since_save >= self.settings.save_every):
                self.save(listener)
        if self._validation is not None and self.progress.figures.get("step") != self.progress.step:
            self.validate(listener)
        self.save(listener)
        return True

    def step(self, stop: Callable[[], bool] = lambda: False) -> StepReport | None:
        """One step of the optimiser; None when asked to stop, with nothing changed."""
        began = time.perf_counter()
        settings, place = self.settings, self.progress.step
        start = place * settings.accumulate
        end = start + settings.accumulate
        numbers = range(start, end if self._num_batches is None else min(end, self._num_batches))
        asked = time.perf_counter()
        if not self._source.ready(place, numbers, stop):
            return None
        feature_seconds = time.perf_counter() - asked
        self._optimiser.zero_grad(set_to_none=False)
        totals = torch.zeros(3 + 3 * self.options.num_depths, dtype=torch.float64)
        for number in self._together.own(numbers):
            if stop():
                break
            asked = time.perf_counter()
            batch = self._source.numbered(number, self._order.batch(number))
            feature_seconds += time.perf_counter() - asked
            found = self._backward(batch, number)
            totals += _as_totals(found, int(batch.lengths_B.sum()), self.options.num_depths)
        if self._together.any_of(stop()):
            return None
        gradients = self._add_up(totals)
        rows = max(float(totals[0]), 1.0)
        for gradient in gradients:
            gradient /= rows
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), settings.clip))
        loss = float(totals[1]) / rows
        self._require_finite(place + 1, "the loss is", math.isfinite(loss))
        self._require_finite(place + 1, "the gradient is", math.isfinite(norm))
        rate = self._set_rate()
        self._optimiser.step()
        changed = (weight for weight in self.module.parameters() if weight.requires_grad)
        self._require_finite(place + 1, "the weights are", all(bool(weight.isfinite().all()) for weight in changed))
        seconds = self._together.mean(time.perf_counter() - began)
        self.progress.step += 1
        self.progress.tokens += int(totals[2])
        self.progress.seconds += seconds
        by_depth = totals[3:].view(3, -1)
        depth_rows = by_depth[0].clamp(min=1)
        return StepReport(
            step=self.progress.step,
            loss=loss,
            accuracy=tuple((by_depth[1] / depth_rows).tolist()),
            overlap=tuple((by_depth[2] / depth_rows).tolist()),
            rows=int(totals[0]),
            tokens=int(totals[2]),
            gradient=norm,
            rate=rate,
            seconds=seconds,
            feature_seconds=feature_seconds,
        )

    def validate(self, listener: Listener) -> Figures:
        """Judge the validation texts; the best weights so far are kept."""
        assert self._validation is not None
        began = time.perf_counter()
        source, batches = self._validation
        own = self._together.own(range(len(batches)))
        self.module.eval()  # noise that a method learns with is no part of what it is judged by
        tally: Tally = judge_batches(
            self.module, (source.batch(batches[number]) for number in own), self.options.num_depths
        )
        self.module.train()
        self._together.add_up(tally.sums)
        self._require_finite(self.progress.step, "the laws of its drafts are", bool(tally.sums.isfinite().all()))
        figures = tally.figures()
        self.progress.seconds += self._together.mean(time.perf_counter() - began)
        self.progress.figures = {"step": self.progress.step, **as_plain(figures)}
        is_better = figures.greedy_tokens_per_step > self.progress.best
        if is_better:
            self.progress.best, self.progress.best_step = figures.greedy_tokens_per_step, self.progress.step
        if self._together.is_first:
            if is_better:
                weights = {f"weight.{name}": tensor for name, tensor in self.module.state_dict().items()}
                write_state(self.settings.state_dir / BEST, weights, self.progress.figures)
            listener.on_validation(figures, self.progress)
        return figures

    def save(self, listener: Listener) -> None:
        """Write the state to go on from."""
        self._since_save = 0.0
        if self._together.is_first:
            facts = {"progress": vars(self.progress), "identity": self._identity}
            tensors = {**training_tensors(self.module, self._optimiser), **self._source.state()}
            write_state(self.settings.state_dir / LAST, tensors, facts)
            listener.on_save(self.progress)

    def resume(self, tell: Callable[[str], None] = lambda line: None) -> bool:
        """Go on from the state on disk; False when there is none. Raises `DraftsmithError` for one of another run."""
        path = self.settings.state_dir / LAST
        if self._together.is_first:
            remove_leftovers(path.parent)
        if not path.exists():
            return False
        tensors, facts = read_state(path)
        check_identity(facts["identity"], self._identity, self.settings.state_dir)
        restore(self.module, self._optimiser, tensors)
        self._source.restore(tensors)
        self.progress = Progress(**facts["progress"])
        if self.progress.best_step >= 0 and self._together.any_of(not best_fits(path.parent, self.module)):
            tell(
                f"{path.parent / BEST} is missing or damaged; the weights of step {self.progress.best_step}, the best "
                "so far, are lost, and the best from here on are kept instead"
            )
            self.progress.best, self.progress.best_step, self.progress.figures = -1.0, -1, {}
        return True

    def _require_finite(self, step: int, what: str, is_finite: bool) -> None:
        if not is_finite:
            raise DraftsmithError(
                f"step {step}: {what} not finite; a smaller --lr or --compute float32 may help "
                f"({last_state(self.settings.state_dir)})"
            )

    def _backward(self, batch: Any, number: int) -> LossReport:
        """Add one batch's gradient, times its rows, to the gradients."""
        # What a module draws (noise on features) is decided by seed and batch, wherever the run was interrupted.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.settings.seed * 1_000_003 + number) % 2**63)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.compute == "bfloat16"):
                found = self.module.loss(batch, dataclasses.replace(self.options, progress=self._done))
            rows = found.rows.sum()
            if int(rows) and found.loss.requires_grad:
                (found.loss * rows).backward()
        return found

    def _add_up(self, totals: torch.Tensor) -> list[torch.Tensor]:
        """Gradients, and counts in place, summed over all processes."""
        gradients = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        self._together.add_up(*gradients)
        self._together.add_up(totals)
        return gradients

    def _set_rate(self) -> float:
        settings, step, done = self.settings, self.progress.step, self._done
        warmup = math.ceil(settings.warmup * self.num_steps) if settings.max_seconds is None else _TIMED_WARMUP
        factor = rate_factor(step, done, warmup, settings.floor)
        for group in self._optimiser.param_groups:
            group["lr"] = settings.lr * factor * self.module.rate_factor(group["part"], done)
        return settings.lr * factor

    @property
    def _done(self) -> float:
        """Share of the run that is done, 0 to 1."""
        done = self.progress.step / self.num_steps
        if self.settings.max_seconds is not None:
            done = max(done, self.progress.seconds / self.settings.max_seconds)
        return min(done, 1.0)

    def _validation_is_due(self, before: float) -> bool:
        """`before`: share of the run that was done before the last step. Seconds are the same in every process."""
        every = self.settings.validate_every
        if every is None:
            return math.floor(_VALIDATIONS * self._done) > math.floor(_VALIDATIONS * before)
        return self.progress.step % every == 0


_VALIDATIONS = 10
"""Of a run that does not say how often."""


_TIMED_WARMUP = 20
"""Steps of warm-up where seconds end the run, so that their number is not known."""


def loss_options(settings: TrainingSettings, module: DraftModule) -> LossOptions:
    """The method's own loss, with what the settings change."""
    own, most = module.loss_defaults, module.most_depths
    if settings.depths is not None and most is not None and settings.depths > most:
        raise OptionError(f"depths is {settings.depths}; this drafter has {most}: more by --set num_depths=N")
    return LossOptions(
        loss=settings.loss or own.loss,
        decay=own.decay if settings.decay is None else settings.decay,
        num_depths=settings.depths or own.num_depths,
    )


def count_steps(settings: TrainingSettings, order: BatchOrder) -> int:
    """Steps of a run; a huge number where only seconds end it."""
    limits = [settings.steps] if settings.steps is not None else []
    if settings.num_passes is not None:
        limits.append(math.ceil(order.num_batches(settings.num_passes) / settings.accumulate))
    return min(limits, default=_ENDLESS)


_ENDLESS = 1 << 40


_FACTS = {
    "target": "of a target with other weights or another backend",
    "data": "over other training texts",
    "validation": "with other validation texts",
}
"""What a state has of a run beside its settings, in words."""


def check_identity(found: Mapping[str, Any], here: Mapping[str, Any], state_dir: Path) -> None:
    """Raise `OptionError` unless a state belongs to this run."""
    advice = "give another --output, or --force to begin anew"
    # A state of an earlier version lacks settings that are newer; it was made as they are by default. Facts that it
    # lacks cannot be told.
    defaults = {item.name: item.default for item in dataclasses.fields(TrainingSettings)}
    for key, value in here.items():
        if key in _FACTS:
            if found.get(key, value) != value:
                raise OptionError(f"{state_dir} holds a run {_FACTS[key]}; {advice}")
            continue
        if key in _IN_TARGET and "target" in found:
            continue
        there = found.get(key, defaults.get(key))
        if there != value:
            raise OptionError(f"{state_dir} holds a run with {key} {there!r}, and this one has {value!r}; {advice}")


_IN_TARGET = ("model", "backend")
"""Settings that the target's facts stand for: the same files may have another path."""


def _as_totals(found: LossReport, tokens: int, num_depths: int) -> torch.Tensor:
    """Rows, loss times rows, tokens; then per depth rows, hits, overlaps."""
    by_depth = torch.zeros(3, num_depths, dtype=torch.float64)
    rows = found.rows.double()
    by_depth[:, : len(rows)] = torch.stack((rows, found.accuracy.double() * rows, found.overlap.double() * rows))
    total = float(rows.sum())
    head = torch.tensor([total, float(found.loss.detach()) * total if total else 0.0, tokens], dtype=torch.float64)
    return torch.cat((head, by_depth.flatten()))
