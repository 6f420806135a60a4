"""`draftsmith bench`: compare drafters with plain decoding and write a bundle.

Called by `app`; composes the benchmark layer with engines. Invariants: everything that can be wrong with
the options is found before a model is loaded; Ctrl-C keeps what was measured; no thread of ours runs
beside a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftsmith.bench.bundle import BundleWriter
from draftsmith.bench.differences import explain, find_differences
from draftsmith.bench.environment import MachineLoad, hardware, versions
from draftsmith.bench.prompts import Loaded, read_source
from draftsmith.bench.runner import Workload, arms_of, blocks_of, measure, usable_prompts, warm_up
from draftsmith.bench.runs import BASELINE, ArmRun, Difference, Measured
from draftsmith.bench.summary import summarise_run
from draftsmith.cli.interrupts import INTERRUPTED, interrupts_held
from draftsmith.cli.loading import load_arms, request_settings
from draftsmith.cli.options import BenchOptions
from draftsmith.cli.tables import print_bench_tables
from draftsmith.errors import OptionError, PromptError
from draftsmith.registry import DRAFTERS, load_class, parse_selection

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine

# Without a terminal to draw a bar on, a line this often says how far it is.
_TELL_SECONDS = 30.0


def run(options: BenchOptions) -> int:
    """Run the command; returns the exit code."""
    drafters = arms_of(options.drafters)
    for drafter in drafters:
        load_class(parse_selection(drafter, DRAFTERS, "drafter"))
    if BASELINE not in options.drafters.split(","):
        _note(f"the arm {BASELINE} was added: every comparison needs its baseline")
    loaded = _prompts(options)
    workload = _workload(options, loaded)
    writer = BundleWriter(options.output, force=options.force)
    arms = load_arms(options, drafters, concurrency=options.concurrency)
    usable, failed = usable_prompts(workload, arms[BASELINE])
    if not usable:
        raise PromptError(f"no prompt of {options.prompts} can be used; the first: {next(iter(failed.values()))}")
    if failed:
        _note(f"{len(failed)} prompts cannot be used and count as failed; the first: {next(iter(failed.values()))}")
    config = _config(options, drafters, arms[BASELINE], loaded, failed)
    writer.begin(config, workload.prompts)

    load = MachineLoad()
    runs, interrupted = _measure(arms, workload, blocks_of(workload, usable), writer)
    with interrupts_held():
        measured = Measured(
            config=config,
            runs=tuple(runs),
            differences=_differences(runs, arms[BASELINE], workload, measure_gaps=not interrupted),
            failed=failed,
            interrupted=interrupted,
            other_cores=load.others(),
        )
        summary = summarise_run(measured)
        writer.end(measured, summary)
    if options.json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        print_bench_tables(summary)
    _note(f"bundle: {options.output}{' (interrupted: only what was measured)' if interrupted else ''}")
    return INTERRUPTED if interrupted else 0


def _prompts(options: BenchOptions) -> Loaded:
    """The prompts, and a note on whatever of them does not count."""
    for name in ("limit", "per_category"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    loaded = read_source(options.prompts, limit=options.limit, per_category=options.per_category)
    for reason, number in loaded.skipped.items():
        _note(f"{number} entries of {options.prompts} were left out: {reason}")
    if any(prompt.max_new_tokens is not None for prompt in loaded.prompts):
        _note("max_new_tokens of single prompts is not used; --max-new-tokens holds for all")
    return loaded


def _workload(options: BenchOptions, loaded: Loaded) -> Workload:
    settings = request_settings(options, max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos)
    return Workload(
        prompts=loaded.prompts,
        settings=settings,
        concurrency=options.concurrency,
        seed=options.seed,
        raw=options.raw,
    )


def _config(
    options: BenchOptions, drafters: Sequence[str], engine: Engine, loaded: Loaded, failed: Mapping[int, str]
) -> dict[str, Any]:
    asked = dataclasses.asdict(options)
    for name in ("json", "force", "output"):
        del asked[name]
    return {
        **asked,
        "prompts_sha256": loaded.sha256,
        "prompts_read_as": list(loaded.formats),
        "prompts_left_out": dict(loaded.skipped),
        "num_prompts": len(loaded.prompts),
        "failed_prompts": {str(index): reason for index, reason in failed.items()},
        "turns": "the first turn of each question",
        "drafters": list(drafters),
        "backend": engine.backend_name,
        "hardware": hardware(options.threads),
        "versions": versions(),
    }


def _measure(
    arms: Mapping[str, Engine], workload: Workload, blocks: Sequence[Sequence[int]], writer: BundleWriter
) -> tuple[list[ArmRun], bool]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    runs: list[ArmRun] = []
    told = time.monotonic()
    # Refreshed by hand between runs: a refreshing thread would take time from what is measured.
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        disable=not sys.stderr.isatty(),
    )
    try:
        with progress:
            task = progress.add_task("warming up", total=len(arms) * sum(map(len, blocks)))
            progress.refresh()
            warm_up(arms, workload)
            for run in measure(arms, workload, blocks):
                with interrupts_held():
                    writer.add(run)
                    runs.append(run)
                progress.update(task, advance=len(run.prompts), description=f"last: {run.drafter}", refresh=True)
                if progress.disable and time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    _note(f"{progress.tasks[0].completed:.0f} of {progress.tasks[0].total:.0f} answers measured")
    except KeyboardInterrupt:
        return runs, True
    return runs, False


def _differences(
    runs: Sequence[ArmRun], engine: Engine, workload: Workload, *, measure_gaps: bool
) -> dict[tuple[str, int], Difference]:
    outputs = {(run.drafter, output.prompt): output for run in runs for output in run.outputs}
    found: dict[tuple[str, int], Difference] = {}
    for (drafter, prompt), position in find_differences(runs).items():
        found[drafter, prompt] = Difference(position=position, gap=None)
        if measure_gaps:
            baseline, other = outputs[BASELINE, prompt], outputs[drafter, prompt]
            found[drafter, prompt] = explain(engine, workload.request(prompt), baseline, other, workload.settings)
    return found


def _note(text: str) -> None:
    print(f"draftsmith: {text}", file=sys.stderr)
