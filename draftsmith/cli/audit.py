"""`draftsmith audit`: certify that an engine with speculation writes what it would write without.

Called by `app`; composes the audit with an engine of ours, or with two endpoints. Under a lossy rule it certifies
nothing and measures what the rule costs. Exit codes: 0 exact, near ties included; 1 drifting; 3 nothing was tested;
4 lossy, as was asked; 130 interrupted, after the report of what was found so far; 2 a mistake, or a server that went
away, then too after that report.
Invariants: everything that can be wrong with the options is found before a model is loaded; the report goes to stdout
and nothing else does.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.bench.audit import DEFAULT_CASES, ENDPOINT_CASES, SAME_IDS, Audit, AuditPlan, Case
from draftsmith.bench.audit_endpoint import EndpointAudited
from draftsmith.bench.audit_prompts import PROMPTS, audit_prompts
from draftsmith.bench.audit_report import AuditReport, Status, Verdict
from draftsmith.bench.differences import NEAR_TIE
from draftsmith.bench.runs import BASELINE
from draftsmith.cli.console import OutputConsole
from draftsmith.cli.interrupts import INTERRUPTED
from draftsmith.cli.loading import load_audited, request_settings
from draftsmith.cli.options import AuditOptions
from draftsmith.errors import DraftsmithError, OptionError
from draftsmith.registry import DRAFTERS, load_class, parse_selection

NOTHING_TESTED = 3
LOSSY = 4
_EXIT = {
    Verdict.EXACT: 0,
    Verdict.NUMERICS: 0,
    Verdict.DRIFTING: 1,
    Verdict.NOT_TESTED: NOTHING_TESTED,
    Verdict.LOSSY: LOSSY,
}
_COARSE_NEAR_TIE = 0.5
"""Gaps put down to rounding in bfloat16, whose logits of about 20 lie 0.125 apart (0.25 was seen); endpoints may
compute in it."""
_COLORS = {
    Status.OK: "green",
    Status.NUMERICS: "yellow",
    Status.DIFFERS: "bold red",
    Status.LOSSY: "magenta",
    Status.NOT_TESTED: "dim",
}
_TELL_SECONDS = 30.0
_BEGINS = b'{"verdict": '
"""How a report for machines begins, so that one is not mistaken for a file of somebody else's."""


def run(options: AuditOptions) -> int:
    """Run the command; returns the exit code."""
    if options.output is not None:
        _check_writable(options.output)
    audit = _endpoint_audit(options) if options.endpoint or options.plain_endpoint else _engine_audit(options)
    broke: DraftsmithError | None = None
    try:
        interrupted = _carry_out(audit)
    except DraftsmithError as error:
        # Such as a server that went away: what was found before it did is told, and then why there is no more.
        broke, interrupted = error, True
    report = audit.report(interrupted=interrupted)
    if broke is not None and report.verdict is Verdict.NOT_TESTED:
        raise broke
    document = json.dumps(report.as_json(), ensure_ascii=False, default=str)
    if options.json:
        print(document)
    else:
        _print_report(report)
    if options.output is not None:
        _write(options.output, document + "\n")
    if broke is not None:
        raise broke
    return INTERRUPTED if interrupted else _EXIT[report.verdict]


def _engine_audit(options: AuditOptions) -> Audit:
    load_class(parse_selection(options.drafter, DRAFTERS, "drafter"))
    if options.drafter == BASELINE:
        raise OptionError("drafter none drafts nothing, so there is nothing to audit; give another, such as suffix")
    cases = _lossy_cases(options) or _cases(options, DEFAULT_CASES, rule=options.rule)
    for case in cases:
        request_settings(max_new_tokens=options.max_new_tokens, **case.settings)
    plan = _plan(
        options,
        cases,
        subject=f"{options.model} with {options.drafter}, rule {options.rule}, controller {options.controller}",
        same_ids=options.rule in SAME_IDS,
        near_tie=_COARSE_NEAR_TIE if options.dtype == "bfloat16" else NEAR_TIE,
    )
    audited, plain, target, chat = load_audited(options, options.drafter, at_once=len(PROMPTS))
    return Audit(plan, audited, plain, target, audit_prompts(chat=chat))


def _endpoint_audit(options: AuditOptions) -> Audit:
    if not options.endpoint or not options.plain_endpoint:
        raise OptionError("--endpoint and --plain-endpoint belong together: one server that drafts, one that does not")
    if options.rule != AuditOptions().rule:
        raise OptionError(f"--rule {options.rule} is for a model of ours; an endpoint verifies as it was started to")
    named = None if options.model == AuditOptions().model else options.model
    audited, plain = (EndpointAudited(url, model=named) for url in (options.endpoint, options.plain_endpoint))
    plan = _plan(
        options,
        _cases(options, ENDPOINT_CASES),
        subject=f"{options.endpoint} beside {options.plain_endpoint}",
        same_ids=False,
        near_tie=_COARSE_NEAR_TIE,
    )
    return Audit(plan, audited, plain, None, PROMPTS)


def _plan(options: AuditOptions, cases: list[Case], **more: Any) -> AuditPlan:
    return AuditPlan(
        cases=cases,
        alpha=options.alpha,
        drift=options.drift,
        budget=options.budget,
        max_seconds=options.max_seconds,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        **more,
    )


def _cases(options: AuditOptions, grid: tuple[Case, ...], **more: Any) -> list[Case]:
    if options.temperature is None:
        if options.top_k or options.top_p != 1:
            raise OptionError("--top-k and --top-p need a --temperature; without one the audit tries a grid of its own")
        chosen = grid
    else:
        asked: dict[str, Any] = {"temperature": options.temperature, "top_p": options.top_p}
        asked |= {"top_k": options.top_k} if options.top_k else {}
        named = Case(name=", ".join(f"{name} {value:g}" for name, value in asked.items()), settings=asked)
        chosen = (grid[0],) if named.is_greedy else (grid[0], named)
    return [case if case.is_greedy else Case(name=case.name, settings={**case.settings, **more}) for case in chosen]


def _lossy_cases(options: AuditOptions) -> list[Case]:
    """The settings that a lossy rule serves, all of them under it; none under an exact rule. Raises `OptionError`."""
    from draftsmith.core.inexact import InexactRule
    from draftsmith.engine.params import parse_rule

    rule = parse_rule(options.rule)
    if not isinstance(rule, InexactRule):
        return []
    if options.temperature is not None:
        rule.check_temperature(options.temperature)
    chosen = [case for case in _cases(options, DEFAULT_CASES) if rule.greedy in (None, case.is_greedy)]
    return [Case(name=case.name, settings={**case.settings, "rule": rule.text}) for case in chosen]


def _carry_out(audit: Audit) -> bool:
    """Run it under a progress bar; returns whether Ctrl-C ended it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    told = time.monotonic()
    try:
        with progress:
            task = progress.add_task("auditing", total=1.0)

            def tell(doing: str, share: float) -> None:
                nonlocal told
                progress.update(task, completed=share, description=doing, refresh=True)
                if progress.disable and time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    print(f"draftsmith: {100 * share:.0f} % audited, next: {doing}", file=sys.stderr)

            audit.run(tell)
    except KeyboardInterrupt:
        return True
    return False


def _print_report(report: AuditReport) -> None:
    from rich.table import Table
    from rich.text import Text

    console = OutputConsole(sys.stdout)
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "outcome", "evidence"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "evidence")
    for check in report.checks:
        table.add_row(check.name, Text(check.status.value, style=_COLORS[check.status]), check.evidence)
    console.print(table)
    console.print()
    verdict = report.verdict.value.upper() + (" SO FAR (interrupted)" if report.interrupted else "")
    console.print(f"{verdict}. {report.statement}")
    for check in report.checks:
        if check.status in (Status.DIFFERS, Status.NUMERICS):
            for request in check.reproduce[:1]:
                # On one line wherever it goes, for it is copied.
                console.print(f"To see it again ({check.name}): {json.dumps(request, default=str)}", soft_wrap=True)


def _check_writable(path: Path) -> None:
    """Only a report is ever replaced by one: anything else there may be a mistake that costs somebody a file."""
    if path.is_dir():
        raise OptionError(f"output {path} is a directory; give a file")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"output {path}: there is no directory {path.parent}")
    try:
        if path.is_file() and _beginning(path) not in (b"", _BEGINS):
            raise OptionError(f"output {path} is not an audit's report; give another name")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error


def _beginning(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(len(_BEGINS))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> OptionError:
    return OptionError(f"cannot write to output {path}: {error.strerror}")
