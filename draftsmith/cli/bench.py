"""`draftsmith bench`: compare drafters with plain decoding, and other engines with this one, and write a bundle.

Called by `app`; composes the benchmark layer with engines. Invariants: everything that can be wrong with
the options is found before a model is loaded; Ctrl-C keeps what was measured; no thread of ours runs
beside a measurement.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from draftsmith.bench.arms import Arm, Description, RunInfo, check_arm, make_arm
from draftsmith.bench.arrivals import ClosedLoop, OpenLoop, parse_arrivals, plan
from draftsmith.bench.bundle import BundleWriter
from draftsmith.bench.differences import explain, find_differences
from draftsmith.bench.environment import MachineLoad, hardware, versions
from draftsmith.bench.latency import Targets
from draftsmith.bench.own_arm import OwnArm
from draftsmith.bench.prompts import Loaded, Prompt, read_source
from draftsmith.bench.repeats import Plan, repeated
from draftsmith.bench.runner import Encode, Workload, blocks_of, first_messages, usable_prompts, warm_up
from draftsmith.bench.runs import BASELINE, ArmRun, Difference, Key, Measured
from draftsmith.bench.summary import summarise_run
from draftsmith.bench.workloads.lengths import LengthTier, fit_prompts, parse_tiers
from draftsmith.cli.console import note
from draftsmith.cli.interrupts import INTERRUPTED, interrupts_held
from draftsmith.cli.loading import load_arms, request_settings
from draftsmith.cli.options import BenchOptions
from draftsmith.cli.report import leave_report
from draftsmith.cli.tables import print_bench_tables
from draftsmith.errors import OptionError, PromptError
from draftsmith.registry import DRAFTERS, load_class, parse_selection

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine

# Without a terminal to draw a bar on, a line this often says how far it is.
_TELL_SECONDS = 30.0


def run(options: BenchOptions) -> int:
    """Run the command; returns the exit code."""
    drafters = _names("--drafters", options.drafters)
    peers = _unique("--peer", options.peer)
    for text in peers:
        check_arm(text)
    if not drafters and not peers:
        raise OptionError("nothing to measure: name drafters (--drafters none,suffix) or engines (--peer ...)")
    if drafters and BASELINE not in drafters:
        drafters.insert(0, BASELINE)
        note(f"the arm {BASELINE} was added: every comparison needs its baseline")
    for drafter in drafters:
        load_class(parse_selection(drafter, DRAFTERS, "drafter"))
    names = [*drafters, *peers]
    baseline = options.baseline or (BASELINE if drafters else names[0])
    if baseline not in names:
        raise OptionError(f"--baseline {baseline!r} is none of the arms: {', '.join(names)}")
    targets = Targets.parse(options.targets)
    repeats = Plan(repeats=options.repeats, precision=options.precision, max_seconds=options.max_seconds)
    tiers = parse_tiers(options.lengths) if options.lengths else ()
    arrivals = parse_arrivals(options.load or f"closed:{options.concurrency}")
    loaded = _prompts(options)
    sent = plan(arrivals, num_requests=options.requests or len(loaded.prompts), seed=options.seed)
    if not options.timeout > 0:
        raise OptionError(f"timeout must be above 0 seconds, got {options.timeout}")
    writer = BundleWriter(options.output, force=options.force)
    request_settings(options, max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos)

    if isinstance(sent, OpenLoop):
        for line in sent.skipped:
            note(f"left out of the trace: {line}")
    engines = load_arms(options, drafters, concurrency=_concurrency(sent)) if drafters else {}
    judge = next(iter(engines.values()), None)
    workload = _workload(options, _at_lengths(loaded.prompts, tiers, judge, options.seed), sent, judge)
    own = [
        OwnArm(name, engine, max_concurrency=_concurrency(sent), rule=options.rule) for name, engine in engines.items()
    ]
    info = _run_info(options, workload, judge)
    arms: dict[str, Arm] = {arm.name: arm for arm in [*own, *(make_arm(text, info) for text in peers)]}
    encode: Encode = own[0].encode if own else (lambda messages, text: None)
    usable, failed = usable_prompts(workload, encode)
    if not usable:
        raise PromptError(f"no prompt of {options.prompts} can be used; the first: {next(iter(failed.values()))}")
    if failed:
        note(f"{len(failed)} prompts cannot be used and count as failed; the first: {next(iter(failed.values()))}")
    with _opened(arms) as descriptions:
        config = _config(
            options,
            loaded,
            names=names,
            baseline=baseline,
            targets=targets,
            failed=failed,
            num_prompts=len(workload.prompts),
            sent=sent,
        )
        config["load"] = str(options.load or f"closed:{options.concurrency}")
        config["descriptions"] = {name: dataclasses.asdict(found) for name, found in descriptions.items()}
        writer.begin(config, workload.prompts)
        machine = MachineLoad()
        runs, interrupted = _measure(arms, workload, encode, blocks_of(workload, usable), repeats, config, writer)
        with interrupts_held():
            measured = Measured(
                config=config,
                runs=tuple(runs),
                differences=_differences(runs, baseline, None if interrupted else judge, workload),
                failed=failed,
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


def _names(flag: str, text: str) -> list[str]:
    """Drafter selections from a comma-separated list; "-" is none of ours."""
    if text.strip() == "-":
        return []
    named = [part.strip() for part in text.split(",")]
    if not all(named):
        raise OptionError(f"{flag} {text!r} has an empty name; write them as none,ngram,suffix")
    return _unique(flag, named)


def _unique(flag: str, named: Sequence[str]) -> list[str]:
    doubled = {name for name in named if named.count(name) > 1}
    if doubled:
        raise OptionError(f"{flag} names {', '.join(sorted(doubled))} more than once")
    return list(named)


def _run_info(options: BenchOptions, workload: Workload, judge: Engine | None) -> RunInfo:
    """What other engines are told: room for the longest conversation, and our tokenizer where there is one."""
    if judge is None:
        return RunInfo(threads=options.threads or len(os.sched_getaffinity(0)))
    tokenizer = judge.tokenizer
    longest = 0
    for prompt in workload.prompts:
        said = sum(len(tokenizer.encode(turn, special=False)) for turn in (*prompt.turns, prompt.system or ""))
        answers = len(prompt.turns) * (prompt.max_new_tokens or workload.max_new_tokens)
        longest = max(longest, said + answers + 64 * (1 + len(prompt.turns)))  # marks of the chat template
    room = min(max(2048, longest), judge.spec.max_context)
    return RunInfo(
        threads=options.threads or len(os.sched_getaffinity(0)),
        context_len=room,
        count_tokens=lambda text: len(tokenizer.encode(text, special=False)),
        decode=tokenizer.decode,
    )


def _concurrency(sent: ClosedLoop | OpenLoop) -> int:
    # An open loop may have any number under way; what an engine batches in one step stays its own affair.
    return sent.concurrency if isinstance(sent, ClosedLoop) else 8


def _prompts(options: BenchOptions) -> Loaded:
    """The prompts, and a note on whatever of them does not count."""
    for name in ("limit", "per_category"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    loaded = read_source(
        options.prompts, limit=options.limit, per_category=options.per_category, max_turns=options.max_turns
    )
    for reason, number in loaded.skipped.items():
        note(f"{number} entries of {options.prompts} were left out: {reason}")
    return loaded


def _at_lengths(
    prompts: Sequence[Prompt], tiers: Sequence[LengthTier], judge: Engine | None, seed: int
) -> Sequence[Prompt]:
    """The prompts once for each tier of lengths, or as they are."""
    if not tiers:
        return prompts
    if judge is None:
        raise OptionError("--lengths counts tokens with our model's tokenizer: name a drafter too, at least none")
    tokenizer = judge.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    return [
        dataclasses.replace(prompt, category=str(tier))
        for tier in tiers
        for prompt in fit_prompts(prompts, tier, encode, tokenizer.decode, seed=seed)
    ]


def _workload(
    options: BenchOptions, prompts: Sequence[Prompt], sent: ClosedLoop | OpenLoop, judge: Engine | None
) -> Workload:
    ends = frozenset[int]() if options.ignore_eos or judge is None else judge.eos_ids
    return Workload(
        prompts=prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        end_ids=ends,
        ignore_eos=options.ignore_eos,
        concurrency=_concurrency(sent),
        open_loop=sent if isinstance(sent, OpenLoop) else None,
        seed=options.seed,
        raw=options.raw,
        timeout=options.timeout,
    )


def _config(
    options: BenchOptions,
    loaded: Loaded,
    *,
    names: Sequence[str],
    baseline: str,
    targets: Targets,
    failed: Mapping[int, str],
    num_prompts: int,
    sent: ClosedLoop | OpenLoop,
) -> dict[str, Any]:
    asked = dataclasses.asdict(options)
    for name in ("json", "force", "output", "drafters", "peer", "targets", "baseline"):
        del asked[name]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **asked,
        "arms": list(names),
        "baseline": baseline,
        "targets": dataclasses.asdict(targets),
        "prompts_sha256": loaded.sha256,
        "prompts_read_as": list(loaded.formats),
        "prompts_left_out": dict(loaded.skipped),
        "num_prompts": num_prompts,
        "trace_left_out": list(sent.skipped) if isinstance(sent, OpenLoop) else [],
        "failed_prompts": {str(index): reason for index, reason in failed.items()},
        "hardware": hardware(options.threads),
        "versions": versions(),
    }


@contextmanager
def _opened(arms: Mapping[str, Arm]) -> Iterator[dict[str, Description]]:
    """All arms ready; whatever happens, they are closed at the end."""
    try:
        descriptions = {}
        for name, arm in arms.items():
            if not isinstance(arm, OwnArm):
                note(f"starting {name} ...")
            descriptions[name] = arm.open()
        yield descriptions
    finally:
        for arm in arms.values():
            arm.close()


def _measure(
    arms: Mapping[str, Arm],
    workload: Workload,
    encode: Encode,
    blocks: Sequence[Sequence[int]],
    plan: Plan,
    config: Mapping[str, Any],
    writer: BundleWriter,
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
            task = progress.add_task("warming up", total=plan.repeats * len(arms) * sum(map(len, blocks)))
            progress.refresh()
            for name, arm in arms.items():
                error = warm_up(arm, workload, encode)
                if error is not None:
                    note(f"{name} failed while warming up: {error}")
            for run in repeated(arms, workload, encode, blocks, plan, config):
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
