"""`draftsmith bench`: compare drafters with plain decoding, and other engines with this one, and write a bundle.

Called by `app`; composes the benchmark layer with engines. Invariants: everything that can be wrong with
the options is found before a model is loaded; Ctrl-C keeps what was measured; no thread of ours runs
beside a measurement.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from draftsmith.bench.arms import Arm, Description
from draftsmith.bench.bundle import BundleWriter
from draftsmith.bench.differences import explain, find_differences
from draftsmith.bench.environment import MachineLoad
from draftsmith.bench.own_arm import OwnArm
from draftsmith.bench.repeats import Plan, repeated
from draftsmith.bench.runner import Workload, blocks_of, first_messages, warm_up
from draftsmith.bench.runs import ArmRun, Difference, Key, Measured
from draftsmith.bench.summary import summarise_run
from draftsmith.cli.bench_setup import Ready, check, config_of, prepare
from draftsmith.cli.console import note
from draftsmith.cli.interrupts import INTERRUPTED, interrupts_held
from draftsmith.cli.options import BenchOptions
from draftsmith.cli.report import leave_report
from draftsmith.cli.tables import print_bench_tables

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine

# Without a terminal to draw a bar on, a line this often says how far it is.
_TELL_SECONDS = 30.0


def run(options: BenchOptions) -> int:
    """Run the command; returns the exit code."""
    asked = check(options)
    writer = BundleWriter(options.output, force=options.force)
    ready = prepare(asked)
    with _opened(ready.arms) as descriptions:
        config = config_of(asked, ready, descriptions)
        writer.begin(config, ready.workload.prompts)
        machine = MachineLoad(lambda: _processes(ready.arms))
        runs, interrupted = _measure(ready, asked.plan, config, writer)
        with interrupts_held():
            measured = Measured(
                config=config,
                runs=tuple(runs),
                differences=_differences(runs, asked.baseline, None if interrupted else ready.judge, ready.workload),
                failed=ready.failed,
                interrupted=interrupted,
                other_cores=machine.others(),
            )
            summary = summarise_run(measured)
            writer.end(measured, summary)
    if options.json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        print_bench_tables(summary)
    leave_report(options.output, measured, summary)
    note(f"bundle: {options.output}{' (interrupted: only what was measured)' if interrupted else ''}")
    return INTERRUPTED if interrupted else 0


@contextmanager
def _opened(arms: Mapping[str, Arm]) -> Iterator[dict[str, Description]]:
    """All arms ready; whatever happens, all of them are closed at the end."""
    with ExitStack() as stack:
        descriptions = {}
        for name, arm in arms.items():
            if not isinstance(arm, OwnArm):
                note(f"starting {name} ...")
            stack.callback(arm.close)
            descriptions[name] = arm.open()
        yield descriptions


def _processes(arms: Mapping[str, Arm]) -> list[int]:
    found = (arm.process_id() for arm in arms.values())
    return [process_id for process_id in found if process_id is not None]


def _measure(ready: Ready, plan: Plan, config: Mapping[str, Any], writer: BundleWriter) -> tuple[list[ArmRun], bool]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    arms, workload = ready.arms, ready.workload
    blocks = blocks_of(workload, ready.usable)
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
            task = progress.add_task("warming up", total=plan.repeats * len(arms) * sum(map(len, blocks)))
            progress.refresh()
            for name, arm in arms.items():
                error = warm_up(arm, workload, ready.encode)
                if error is not None:
                    note(f"{name} failed while warming up: {error}")
            for run in repeated(arms, workload, ready.encode, blocks, plan, config):
                with interrupts_held():
                    writer.add(run)
                    runs.append(run)
                progress.update(task, advance=len(blocks[run.block]), description=f"last: {run.arm}", refresh=True)
                if progress.disable and time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    note(f"{progress.tasks[0].completed:.0f} of {progress.tasks[0].total:.0f} prompts measured")
    except KeyboardInterrupt:
        return runs, True
    return runs, False


def _differences(
    runs: Sequence[ArmRun], baseline: str, judge: Engine | None, workload: Workload
) -> dict[Key, Difference]:
    """Where arms leave the baseline, and how close the choice was, as far as our target can judge it."""
    answers = {
        (run.arm, request.prompt, request.turn): request
        for run in reversed(runs)
        for request in run.requests
        if request.error is None
    }
    found: dict[Key, Difference] = {}
    astray: set[tuple[str, int]] = set()
    for place, position in sorted(find_differences(runs, baseline).items(), key=lambda item: item[0].turn):
        found[place] = Difference(position=position, gap=None)
        # What follows a different answer is another conversation.
        if judge is None or (place.arm, place.prompt) in astray:
            continue
        astray.add((place.arm, place.prompt))
        messages = first_messages(workload.prompts[place.prompt])
        for turn in range(place.turn):
            said = answers[baseline, place.prompt, turn].text
            following = workload.prompts[place.prompt].turns[turn + 1]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": following}]
        expected = answers[baseline, place.prompt, place.turn].token_ids
        other = answers[place.arm, place.prompt, place.turn].token_ids
        assert expected is not None and other is not None
        prompt: Any = messages[-1]["content"] if workload.raw else messages
        settings = {"temperature": workload.temperature, "seed": workload.seed}
        found[place] = explain(judge, prompt, expected, other, settings)
    return found
