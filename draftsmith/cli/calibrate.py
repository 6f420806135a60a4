"""`draftsmith calibrate`: measure what steps cost on this machine, and keep it for the controllers.

Called by `app`. The target's forwards come first, then each drafter through the engine; what is done is written at
once, so Ctrl-C loses only the part that was under way. Invariants: options and places are checked before a model is
loaded; a table that is there is replaced whole.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli.calibrate_options import CalibrateOptions
from draftsmith.cli.console import note
from draftsmith.errors import DataError, OptionError

if TYPE_CHECKING:
    from draftsmith.control.cost_table import CostTable
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.loading import LoadedModel

_BUSY_CORES = 0.1
_SHOWN_ROWS = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = 64
_LONG_PROMPTS = (400, 1200)


def run(options: CalibrateOptions) -> int:
    """Run the command; returns the exit code."""
    _check(options)
    from draftsmith.cli.loading import loading_notice
    from draftsmith.engine.cost_store import cost_file, read_costs, write_costs
    from draftsmith.engine.loading import load_model

    def load(name: str) -> LoadedModel:
        return load_model(name, backend=options.backend, dtype=options.dtype, threads=options.threads)

    with loading_notice(f"loading {options.model} ..."):
        model = load(options.model)
    path = cost_file(model.identity)
    if options.show or options.refresh is not None:
        table = read_costs(model.identity)
        if table is None:
            raise DataError(
                f"nothing is known of {options.model} here; run draftsmith calibrate --model {options.model}"
            )
        if options.refresh is not None:
            from draftsmith.bench.bundle import read

            for arm_run in read(options.refresh).runs:
                table = table.refreshed(arm_run.events)
            write_costs(table, path)
    else:
        table = _measure(options, model, load, lambda found: write_costs(found, path))
    if options.picture is not None:
        from draftsmith.bench.cost_picture import draw_costs

        draw_costs(table, options.picture)
    _print(table, path, as_json=options.json)
    return 0


def _check(options: CalibrateOptions) -> None:
    from draftsmith.registry import DRAFTERS, parse_selection

    if options.repeats < 3:
        raise OptionError(f"--repeats is {options.repeats}; a median wants at least 3")
    if options.max_context < 64:
        raise OptionError(f"--max-context is {options.max_context}; it must be at least 64")
    if options.show and (options.refresh is not None or options.drafter):
        raise OptionError("--show measures nothing: leave --refresh and --drafter out")
    for drafter in options.drafter:
        parse_selection(drafter, DRAFTERS, "drafter")
    if options.picture is not None:
        from draftsmith.bench.cost_picture import check_picture

        check_picture(options.picture)


def _measure(
    options: CalibrateOptions,
    model: LoadedModel,
    load: Callable[[str], LoadedModel],
    keep: Callable[[CostTable], None],
) -> CostTable:
    from draftsmith.bench.environment import MachineLoad, versions
    from draftsmith.cli.progress import Bar
    from draftsmith.control.cost_table import CONTEXT_KNOTS
    from draftsmith.engine.calibration import Sweep, measure_verify

    others = MachineLoad()
    contexts = [context for context in CONTEXT_KNOTS if context <= options.max_context]
    about: dict[str, Any] = {
        **model.identity,
        "model": options.model,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "repeats": options.repeats,
        "versions": versions(),
    }
    with Bar(0, 1) as bar:
        sweep = Sweep(contexts=contexts, repeats=options.repeats)
        table = measure_verify(model.backend, sweep, about, bar.tell)
        keep(table)
        table = _with_own_share(table, model, load)
        keep(table)
        for place, drafter in enumerate(options.drafter):
            bar.tell(place, len(options.drafter), f"drafter {drafter}")
            table = _with_drafter(table, drafter, model, load)
            keep(table)
    busy = others.others()
    if busy is not None and busy > _BUSY_CORES:
        note(f"{busy:.1f} cores were busy with other work: measure again on a quiet machine")
    return table


def _engine(model: LoadedModel, load: Callable[[str], LoadedModel], drafter: str, batch: int) -> Engine:
    from draftsmith.engine.calibration import SWEEP
    from draftsmith.engine.engine import Engine, EngineSettings

    settings = EngineSettings(drafter=drafter, controller=SWEEP, max_batch=batch, prefix_cache=False)
    return Engine(model, settings, load=load)


def _prompts(engine: Engine) -> list[list[int]]:
    """Token ids of the demo's prompts, in the model's own template where it has one, and long ones made of them."""
    from draftsmith.bench.demo_prompts import DEMO_PROMPTS

    short = [engine.encode("\n".join(item["content"] for item in prompt.messages)) for prompt in DEMO_PROMPTS]
    joined = [token for ids in short for token in ids]
    room = engine.spec.max_context - 2 * _TOKENS
    return [ids[:room] for ids in short] + [joined[: min(length, room)] for length in _LONG_PROMPTS]


def _with_own_share(table: CostTable, model: LoadedModel, load: Callable[[str], LoadedModel]) -> CostTable:
    from draftsmith.core.stats import EventLog
    from draftsmith.engine.calibration import fit_own

    steps: list[Any] = []
    requests: list[Any] = []
    for batch in (1, 4):
        engine = _engine(model, load, "ngram", batch)
        engine.generate(_prompts(engine)[: 2 * batch], max_new_tokens=_TOKENS, ignore_eos=True)
        log = engine.take_events()
        # Step numbers are an engine's own; a log holds one engine's.
        shift = 1 + max((step.step for step in steps), default=-1)
        steps += [step._replace(step=step.step + shift) for step in log.steps]
        requests += [record._replace(step=record.step + shift) for record in log.requests]
    own_step, own_request, own_row = fit_own(EventLog(steps, requests))
    return dataclasses.replace(table, own_step=own_step, own_request=own_request, own_row=own_row)


def _with_drafter(table: CostTable, drafter: str, model: LoadedModel, load: Callable[[str], LoadedModel]) -> CostTable:
    from draftsmith.engine.calibration import SweepController, fit_draft

    records: list[Any] = []
    for batch in (1, 4):
        engine = _engine(model, load, drafter, batch)
        controller = engine.controller
        assert isinstance(controller, SweepController)
        prompts = _prompts(engine)
        for start in range(0, len(prompts), batch):
            engine.generate(prompts[start : start + batch], max_new_tokens=_TOKENS, ignore_eos=True)
        records += controller.records
    return table.with_draft(drafter, fit_draft(records))


def _print(table: CostTable, path: Path, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": str(path), **table.as_json()}))
        return
    print(f"{table.about.get('model')}: milliseconds of a forward, by rows and context")
    print(f"{'context':>8}" + "".join(f"{rows:>9}" for rows in _SHOWN_ROWS) + "   spread")
    for context, spread in zip(table.contexts, table.spread, strict=True):
        cells = "".join(f"{1e3 * table.verify_seconds(rows, context):>9.2f}" for rows in _SHOWN_ROWS)
        print(f"{context:>8}{cells}   +-{100 * sorted(spread)[len(spread) // 2]:.0f} %")
    print(f"each further sequence: {1e6 * table.request:.0f} us, {1e9 * table.request_context:.1f} ns a row of context")
    print(f"the engine's own: {1e6 * table.own_step:.0f} us a step, {1e6 * table.own_request:.0f} us a request")
    _print_drafters(table.draft)
    print(f"kept in {path}")


def _print_drafters(draft: Mapping[str, Any]) -> None:
    lines: Sequence[tuple[str, Any]] = sorted(draft.items())
    for name, cost in lines:
        print(
            f"{name}: {1e6 * cost.request:.0f} us a request, {1e6 * cost.level:.0f} us a pass, "
            f"{1e6 * cost.pending:.0f} us a token of prompt to read first (off by {100 * cost.error:.0f} %)"
        )
