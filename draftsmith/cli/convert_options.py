"""Options of `draftsmith convert` as a frozen dataclass.

Called by `app` and `cli.convert`. Invariant: nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from draftsmith.cli.options import JsonOption

_WHAT = "What"
_PINS = "Where files do not say it"
_CHECK = "Check and output"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(JsonOption):
    """Options of `draftsmith convert`."""

    source: Annotated[str, Argument(metavar="SOURCE")]
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Where it is written", rich_help_panel=_WHAT)]
    to: Annotated[
        str,
        Option(
            "--to",
            metavar="NAME",
            help="native, eagle1, eagle3, eagle3-speculators, medusa, medusa2, medusa-vllm, hydra, mlp-speculator, "
            "mtp-deepseek, mtp-qwen, mtp-mimo",
            rich_help_panel=_WHAT,
        ),
    ] = "native"
    model: Annotated[
        str | None, Option("--model", "-m", metavar="NAME", help="The target [of a native one: its own]",
                           rich_help_panel=_WHAT)
    ] = None  # fmt: skip
    from_: Annotated[str, Option("--from", metavar="NAME", help="What SOURCE is written in", rich_help_panel=_PINS)] = (
        "auto"
    )
    layer_ids: Annotated[
        str,
        Option("--layer-ids", metavar="KIND", help="EAGLE-3's ids: layers applied, or outputs", rich_help_panel=_PINS),
    ] = "auto"
    set: Annotated[
        list[str],
        Option("--set", metavar="FIELD", help="Of the native config, KEY=VALUE; repeatable", rich_help_panel=_PINS),
    ] = field(default_factory=list)
    with_target: Annotated[
        bool,
        Option("--with-target", help="Write the target's embedding and head too", rich_help_panel=_PINS),
    ] = False
    num_draft: Annotated[
        int, Option("--num-draft", metavar="K", help="Tokens an export advises to draft", rich_help_panel=_PINS)
    ] = 4
    no_check: Annotated[
        bool, Option("--no-check", help="Do not draft some text after an import", rich_help_panel=_CHECK)
    ] = False
    backend: Annotated[
        str, Option("--backend", metavar="NAME", help="Of the target in the check", rich_help_panel=_CHECK)
    ] = "auto"
    threads: Annotated[
        int | None, Option("--threads", metavar="N", help="CPU threads [all cores]", rich_help_panel=_CHECK)
    ] = None
    force: Annotated[bool, Option("--force", help="Replace DIR", rich_help_panel=_CHECK)] = False
