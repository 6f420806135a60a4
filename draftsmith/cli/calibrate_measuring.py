"""The measuring part of `draftsmith calibrate`: the target's forwards, the engine's own work, each drafter.

Called by the command. Invariants: what is measured is kept at once, together with how busy the machine was meanwhile,
and what was kept before stays until it is measured again; prompts fit whatever context the model has.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from draftsmith.cli.calibrate_options import CalibrateOptions
from draftsmith.cli.calibrate_view import ASKED, OTHER_CORES, busy_warning, missing
from draftsmith.cli.interrupts import interrupts_held

if TYPE_CHECKING:
    from draftsmith.control.cost_table import CostTable
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.loading import LoadedModel

_REPEATS = 9
_MOST_TOKENS = 64
_LONG_PROMPTS = (400, 1200)


@final
class Measuring:
    """One calibration; `path`: where its table is kept."""

    def __init__(self, options: CalibrateOptions, path: Path) -> None:
        from draftsmith.bench.environment import MachineLoad

        self._options = options
        self._path = path
        self._others = MachineLoad()
        self._table: CostTable | None = None
        self._earlier: CostTable | None = None
        self._names: dict[str, str] = {}  # what engines call the drafters asked for

    def run(self) -> CostTable:
        """Measure everything that was asked for. Raises `UserError`s."""
        from draftsmith.bench.environment import MachineLoad
        from draftsmith.cli.loading import loading_notice
        from draftsmith.cli.progress import Bar
        from draftsmith.engine.cost_store import read_costs

        with loading_notice(f"loading {self._options.model} ..."):
            model = self._load(self._options.model)
            for drafter in self._options.drafter:
                # One that cannot be made is told of now, not after minutes.
                self._names[drafter] = self._engine(model, drafter, 1).drafter_name
        self._earlier = read_costs(model.identity)
        self._others = MachineLoad()
        with Bar(0, 1) as bar:
            table = self._keep(self._forwards(model, bar))
            table = self._keep(self._with_own_share(table, model))
            for place, drafter in enumerate(self._options.drafter):
                bar.tell(place, len(self._options.drafter), f"drafter {drafter}")
                table = self._keep(self._with_drafter(table, drafter, model))
        return table.filled_from(self._earlier)

    @property
    def left(self) -> str:
        """What there is and what not, after an interrupt."""
        if self._table is None:
            return "nothing was measured, and what was kept before stays"
        lacking = missing(self._table)
        told = [
            f"what forwards cost is kept in {self._path}",
            f"not measured: {', '.join(lacking)}" if lacking else "nothing is missing",
            busy_warning(self._table),
        ]
        return "; ".join(filter(None, told))

    def _load(self, name: str) -> LoadedModel:
        from draftsmith.engine.loading import load_model

        options = self._options
        return load_model(name, backend=options.backend, dtype=options.dtype, threads=options.threads)

    def _keep(self, table: CostTable) -> CostTable:
        from draftsmith.engine.cost_store import write_costs

        table = dataclasses.replace(table, about={**table.about, OTHER_CORES: self._others.others()})
        with interrupts_held():
            write_costs(table.filled_from(self._earlier), self._path)
            self._table = table
        return table

    def _forwards(self, model: LoadedModel, bar: Any) -> CostTable:
        from draftsmith.bench.environment import versions
        from draftsmith.control.cost_table import CONTEXT_KNOTS
        from draftsmith.engine.calibration import Sweep, measure_verify

        longest = self._options.max_context or CONTEXT_KNOTS[-1]
        contexts = [context for context in CONTEXT_KNOTS if context <= longest]
        repeats = self._options.repeats or _REPEATS
        about = {
            **model.identity,
            "model": self._options.model,
            "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "repeats": repeats,
            "versions": versions(),
            ASKED: list(self._names.values()),
        }
        return measure_verify(model.backend, Sweep(contexts=contexts, repeats=repeats), about, bar.tell)

    def _engine(self, model: LoadedModel, drafter: str, batch: int) -> Engine:
        from draftsmith.engine.calibration import SWEEP
        from draftsmith.engine.engine import Engine, EngineSettings

        settings = EngineSettings(drafter=drafter, controller=SWEEP, max_batch=batch, prefix_cache=False)
        return Engine(model, settings, load=self._load)

    def _with_own_share(self, table: CostTable, model: LoadedModel) -> CostTable:
        from draftsmith.core.stats import EventLog
        from draftsmith.engine.calibration import fit_own

        prompts, num_tokens = _prompts(model)
        steps: list[Any] = []
        requests: list[Any] = []
        for batch in (1, 4):
            engine = self._engine(model, "ngram", batch)
            engine.generate(prompts[: 2 * batch], max_new_tokens=num_tokens, ignore_eos=True)
            log = engine.take_events()
            # Step numbers are an engine's own; a log holds one engine's.
            shift = 1 + max((step.step for step in steps), default=-1)
            steps += [step._replace(step=step.step + shift) for step in log.steps]
            requests += [record._replace(step=record.step + shift) for record in log.requests]
        own_step, own_request, own_row = fit_own(EventLog(steps, requests))
        return dataclasses.replace(table, own_step=own_step, own_request=own_request, own_row=own_row)

    def _with_drafter(self, table: CostTable, drafter: str, model: LoadedModel) -> CostTable:
        from draftsmith.engine.calibration import SweepController, fit_draft

        prompts, num_tokens = _prompts(model)
        records: list[Any] = []
        for batch in (1, 4):
            engine = self._engine(model, drafter, batch)
            controller = engine.controller
            assert isinstance(controller, SweepController)
            for start in range(0, len(prompts), batch):
                engine.generate(prompts[start : start + batch], max_new_tokens=num_tokens, ignore_eos=True)
            records += controller.records
        cost = fit_draft(records)
        return table if cost is None else table.with_draft(self._names[drafter], cost)


def _prompts(model: LoadedModel) -> tuple[list[list[int]], int]:
    """Token ids of the demo's prompts and long ones made of them, as its context allows; tokens to write to each."""
    from draftsmith.bench.demo_prompts import DEMO_PROMPTS

    context = model.backend.spec.max_context
    num_tokens = min(_MOST_TOKENS, max(context // 4, 1))
    room = max(context - 2 * num_tokens, 1)
    # Straight from the tokenizer: as prompts they would be refused where the context is short.
    texts = ["\n".join(item["content"] for item in prompt.messages) for prompt in DEMO_PROMPTS]
    short = [model.tokenizer.encode(text, special=False) for text in texts]
    joined = [token for ids in short for token in ids]
    return [ids[:room] for ids in short] + [joined[: min(length, room)] for length in _LONG_PROMPTS], num_tokens
