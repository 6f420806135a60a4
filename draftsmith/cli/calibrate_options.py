"""Options of `draftsmith calibrate`, as those in `options`.

Called by `app` and by the command. Invariant: as there, nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from draftsmith.cli.options import JsonOption, ModelOption

_RUN = "What runs"
_MEASURING = "Measuring"
_OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(JsonOption, ModelOption):
    """Options of `draftsmith calibrate`."""

    drafter: Annotated[
        list[str],
        Option("--drafter", "-d", metavar="NAME", help="Measure it too; repeatable", rich_help_panel=_RUN),
    ] = field(default_factory=list)
    backend: Annotated[
        str, Option("--backend", metavar="NAME", help="native, reference, or auto", rich_help_panel=_RUN)
    ] = "auto"
    dtype: Annotated[
        str, Option("--dtype", metavar="TYPE", help="Floats of the reference backend", rich_help_panel=_RUN)
    ] = "auto"
    threads: Annotated[
        int | None, Option("--threads", metavar="N", help="CPU threads [all cores]", rich_help_panel=_RUN)
    ] = None
    repeats: Annotated[
        int | None, Option("--repeats", "-r", metavar="N", help="Forwards of each size [9]", rich_help_panel=_MEASURING)
    ] = None
    max_context: Annotated[
        int | None,
        Option("--max-context", metavar="N", help="Longest context measured [4096]", rich_help_panel=_MEASURING),
    ] = None
    refresh: Annotated[
        Path | None,
        Option(
            "--refresh",
            metavar="BUNDLE",
            help="Learn from a benchmark of this model instead",
            rich_help_panel=_MEASURING,
        ),
    ] = None
    picture: Annotated[
        Path | None,
        Option("--picture", metavar="FILE", help="Draw the cost curve (.png, .svg)", rich_help_panel=_OUTPUT),
    ] = None
    show: Annotated[
        bool, Option("--show", help="Only show what is known, measure nothing", rich_help_panel=_OUTPUT)
    ] = False
