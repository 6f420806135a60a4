"""`draftsmith bench report`: bundles as one page, and the page that `bench` leaves in its bundle.

Called by `app` and `bench`. Invariants: every figure comes from the bundles' own logs; only a report is ever replaced
by one; what is missing for the plots is told in one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.bench.bundle import is_bundle, read, read_summary
from draftsmith.bench.report.document import Run, document
from draftsmith.bench.report.figures import can_draw
from draftsmith.bench.report.render import MARK, to_html, to_markdown
from draftsmith.bench.runs import Measured
from draftsmith.bench.summary import figures_of, summarise_run
from draftsmith.cli.console import note
from draftsmith.cli.options import ReportOptions
from draftsmith.errors import OptionError, UserError
from draftsmith.io.staging import staged_file

_INSTALL = 'plots need matplotlib: pip install "draftsmith[bench]"'


def run(options: ReportOptions) -> int:
    """Render bundles to one file, or to stdout as Markdown; returns the exit code."""
    is_markdown = options.markdown or (options.output is not None and options.output.suffix == ".md")
    if not is_markdown and not can_draw():
        raise UserError(f"{_INSTALL} (--markdown works without)")
    target = _target(options.bundles, options.output, is_markdown)
    if options.json and target is None:
        raise OptionError("--json and --markdown would both write to stdout; name a file with --output")
    if target is not None:
        _check(target)
    runs, remarks = [], []
    for name, path in zip(_names(options.bundles), options.bundles, strict=True):
        measured = read(path)
        summary = json.loads(json.dumps(summarise_run(measured)))
        runs.append((name, summary, measured))
        remarks += _remarks(name, path, summary)
    page = document(runs, draw=not is_markdown, remarks=remarks)
    text = to_markdown(page) if is_markdown else to_html(page)
    if target is None:
        print(text, end="")
        return 0
    _write(target, text)
    if options.json:
        told = [{"bundle": str(path), "summary": run[1]} for path, run in zip(options.bundles, runs, strict=True)]
        print(json.dumps({"report": str(target), "runs": told}, ensure_ascii=False))
    note(f"report: {target}")
    return 0


def leave_report(directory: Path, measured: Measured, summary: Mapping[str, Any]) -> None:
    """Write report.html into a bundle that is whole; whatever goes wrong, the run is safe and the command goes on."""
    if not can_draw():
        note(f"no report.html: {_INSTALL}")
        return
    try:
        run: Run = (directory.resolve().name, json.loads(json.dumps(summary)), measured)
        _write(directory / "report.html", to_html(document([run], draw=True)))
    except Exception as error:
        note(f"no report.html ({type(error).__name__}: {' '.join(str(error).split())}); the bundle is whole")


def _target(bundles: Sequence[Path], output: Path | None, is_markdown: bool) -> Path | None:
    """The file to write; None for stdout."""
    name = "report.md" if is_markdown else "report.html"
    if output is None:
        if is_markdown:
            return None
        if len(bundles) > 1:
            raise OptionError("a report of several bundles belongs to none of them: name a file with --output")
        return bundles[0] / name
    return output if output.suffix and not output.is_dir() else output / name


def _check(target: Path) -> None:
    """Raises `OptionError` where a file that is no report stands in the way."""
    try:
        if target.is_dir() or (target.exists() and MARK.encode() not in target.read_bytes()[:1000]):
            raise OptionError(f"output {target} is not a report; give another name")
    except OSError as error:
        raise OptionError(f"cannot write {target}: {error.strerror}") from error


def _write(target: Path, text: str) -> None:
    """Write a file whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(target) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"cannot write {target}: {error.strerror}") from error


def _names(bundles: Sequence[Path]) -> list[str]:
    """What each is called: its directory's name, or its path where two have the same."""
    short = [path.resolve().name for path in bundles]
    return short if len(set(short)) == len(short) else [str(path) for path in bundles]


def _remarks(name: str, path: Path, summary: Mapping[str, Any]) -> list[str]:
    """What is odd about a bundle as it lies there."""
    if is_bundle(path) and not (path / "summary.json").exists():
        return [f"{name} was cut off and has no summary of its own: this is what was measured."]
    if figures_of(read_summary(path)) != figures_of(summary):
        return [
            f"{name}: summary.json holds other figures than its logs give, which are the ones here "
            "(draftsmith bench rescore names them)."
        ]
    return []
