"""The `draftsmith` command: its commands, and how errors become one line and an exit code.

The entry point of the installed script. Exit codes: 0 done; 1 the demo found a difference that a near
tie does not explain, a bundle's figures are not those of its logs, or the audit found a drift; 2 the user's
mistake, or something the system refuses (a full disk), told in one line on stderr; 3 the audit could test nothing;
4 the audit measured what a lossy rule costs; 130 stopped by Ctrl-C; 141 the reader of stdout went away. Invariant: no
mistake of a user ends in a traceback.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from draftsmith.cli.calibrate_options import CalibrateOptions
from draftsmith.cli.commands import PlainGroup, add_command
from draftsmith.cli.convert_options import ConvertOptions
from draftsmith.cli.data_options import PrepareOptions, RegenerateOptions, SynthOptions
from draftsmith.cli.interrupts import INTERRUPTED, keep_interrupts
from draftsmith.cli.options import (
    AuditOptions,
    BenchOptions,
    ChatOptions,
    CompareOptions,
    DemoOptions,
    GenerateOptions,
    ModelsOptions,
    RegisteredOptions,
    ReportOptions,
    RescoreOptions,
)
from draftsmith.cli.train_options import TrainOptions
from draftsmith.errors import DraftsmithError, OptionError

USER_ERROR = 2

# The parent of every mistake typer finds in a command line (unknown option, missing value, ...).
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    cls=PlainGroup,
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Exact speculative decoding: the same text as plain decoding, in fewer steps.",
    epilog="Start with `draftsmith demo`. Each command explains itself with --help.",
)


@app.callback()
def _top_level(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"draftsmith {_version()}")
        raise typer.Exit()


add_command(
    app,
    "demo",
    DemoOptions,
    "draftsmith.cli.demo:run",
    text="Watch plain and speculative decoding write the same answers.",
    example="draftsmith demo",
)
add_command(
    app,
    "generate",
    GenerateOptions,
    "draftsmith.cli.generate:run",
    text="Answer one prompt.",
    example='draftsmith generate -t 0.7 --seed 1 "Name three uses of a brick."',
)
add_command(
    app,
    "chat",
    ChatOptions,
    "draftsmith.cli.chat:run",
    text="Talk to a model.",
    example='draftsmith chat --system "Answer in one sentence."',
)
add_command(
    app,
    "bench",
    BenchOptions,
    "draftsmith.cli.bench:run",
    text="Compare drafters with plain decoding, paired and interleaved.",
    example="draftsmith bench -p builtin -d none,ngram,suffix -o bundles/first",
    elsewhere=("ignore_eos", "raw", "top_p", "rule", "controller", "backend", "dtype", "threads"),
)
add_command(
    app,
    "bench compare",
    CompareOptions,
    "draftsmith.cli.bundles:run_compare",
    text="Say what changed between two runs, and whether it is noise.",
    example="draftsmith bench compare bundles/before bundles/after",
)
add_command(
    app,
    "bench report",
    ReportOptions,
    "draftsmith.cli.report:run",
    text="Show runs on one page with plots, or as Markdown.",
    example="draftsmith bench report bundles/c1 bundles/c8 -o crossover.html",
)
add_command(
    app,
    "bench rescore",
    RescoreOptions,
    "draftsmith.cli.bundles:run_rescore",
    text="Compute a run's figures again from its logs alone.",
    example="draftsmith bench rescore bundles/first",
)
add_command(
    app,
    "audit",
    AuditOptions,
    "draftsmith.cli.audit:run",
    text="Certify that drafting changes nothing of what is written.",
    example="draftsmith audit --model smollm2 --drafter suffix",
)
add_command(
    app,
    "data synth",
    SynthOptions,
    "draftsmith.cli.data:run_synth",
    text="Have a model write texts to train its drafters on.",
    example="draftsmith data synth --answer-tokens 300000 -o data/raw",
)
add_command(
    app,
    "data regenerate",
    RegenerateOptions,
    "draftsmith.cli.data:run_regenerate",
    text="Have a model, or a server, answer your own prompts.",
    example="draftsmith data regenerate -i prompts.jsonl -o data/mine",
)
add_command(
    app,
    "data prepare",
    PrepareOptions,
    "draftsmith.cli.data_prepare:run",
    text="Turn texts into token ids and masks, ready to train on.",
    example="draftsmith data prepare -i data/raw -o data/ready",
)
add_command(
    app,
    "train",
    TrainOptions,
    "draftsmith.cli.train:run",
    text="Train a drafter for a model.",
    example="draftsmith train --method eagle3 --model smollm2 --data d -o e",
)
add_command(
    app,
    "calibrate",
    CalibrateOptions,
    "draftsmith.cli.calibrate:run",
    text="Measure what steps cost on this machine.",
    example="draftsmith calibrate -m smollm2 -d draft_model:model=tiny.gguf",
)
add_command(
    app,
    "convert",
    ConvertOptions,
    "draftsmith.cli.convert:run",
    text="Read a published drafter, or write yours as others read it.",
    example="draftsmith convert org/eagle3-drafter --model org/model -o e3",
)
add_command(
    app,
    "models",
    ModelsOptions,
    "draftsmith.cli.models:run",
    text="List the models known by name and what else can be loaded.",
    example="draftsmith models",
)
add_command(
    app,
    "options",
    RegisteredOptions,
    "draftsmith.cli.registered:run",
    text="List drafters, controllers and rules with their options.",
    example="draftsmith options goodput",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process."""
    keep_interrupts()
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer may hold characters that the locale lacks
            stream.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = app(args=_joined(arguments), prog_name="draftsmith", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except _UsageError as error:
        return _complain(_usage_message(error))
    except DraftsmithError as error:
        return _complain(str(error))
    except OSError as error:
        _drop_output()
        name = f" ({error.filename})" if error.filename else ""
        return _complain(f"{error.strerror or error}{name}")
    except MemoryError:
        return _complain("not enough memory; a smaller model or fewer and shorter texts need less")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _open_streams() -> None:
    """A stream that the caller closed goes nowhere, where None would break whoever writes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def _drop_output() -> None:
    """What cannot be written now cannot be when the interpreter flushes once more at its end: a full disk, say."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _joined(arguments: Sequence[str]) -> list[str]:
    """`bench compare` is a command with a space in its name, so that `bench` itself can be one too."""
    joined = " ".join(arguments[:2])
    known = {str(command.name) for command in app.registered_commands}
    parts = [name.partition(" ")[2] for name in sorted(known) if name.startswith(f"{joined.split(' ')[0]} ")]
    if parts and joined not in known and len(arguments) > 1 and not arguments[1].startswith("-"):
        raise OptionError(
            f"{arguments[0]} has no part {arguments[1]!r}: write {', '.join(parts)}"
            f"{' or options' if arguments[0] in known else ''}; see draftsmith {arguments[0]} --help"
        )
    return [joined, *arguments[2:]] if len(arguments) > 1 and joined in known else list(arguments)


def _complain(message: str) -> int:
    print(f"draftsmith: error: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "draftsmith"
    return f"{error.format_message().rstrip('.')}; see {command} --help"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("draftsmith")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
