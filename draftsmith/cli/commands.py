"""Turns an options dataclass into a command, and prints help that fits one screen.

Called by `app`. The options of a command are one frozen dataclass; the command's function is imported
only when it runs. Invariant: building the whole command line imports nothing heavier than typer.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable
from typing import Any, final

import typer
from typer.core import TyperCommand, TyperGroup

SCREEN_WIDTH = 80
READER_GONE = 141
"""Exit code when nobody reads stdout any more, as in `draftsmith generate ... | head -1`."""
_LAST_SECTION = "Options"
_GROUPS = {"data": "Make texts to train drafters on."}
"""Words that are no commands, as `data` of `data synth`, and what their help says first."""


class SectionedCommand(TyperCommand):
    """A command whose help lists its options by section, in the order the sections first appear.

    `elsewhere`: names of options that mean the same for `generate`, whose help explains them.
    """

    elsewhere: tuple[str, ...] = ()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write description, usage, sections and an example."""
        params: list[Any] = list(self.get_params(ctx))
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in params if param.param_type_name == "option"]
        for param in options:
            if param.name not in self.elsewhere:
                section = getattr(param, "rich_help_panel", None) or next(reversed(sections), _LAST_SECTION)
                sections.setdefault(section, []).append(_option_row(param))
        arguments = [param.metavar for param in params if param.param_type_name == "argument"]
        required = [f"{param.opts[0]} {param.metavar}" for param in params if param.required and param.metavar]
        needed = arguments or required
        formatter.width = SCREEN_WIDTH
        formatter.write(f"{self.help}\n\n")
        formatter.write(f"{_bold('Usage:')} {ctx.command_path} [OPTIONS] {' '.join(needed)}".rstrip() + "\n")
        width = max(len(first) for rows in sections.values() for first, _ in rows)
        for name, rows in sections.items():
            formatter.write(f"\n{_bold(name + ':')}\n")
            formatter.indent()
            formatter.write_dl([(first.ljust(width), text) for first, text in rows], col_max=width)
            formatter.dedent()
        if self.elsewhere:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in self.elsewhere)
            formatter.write("\n")
            formatter.write_text(f"Also, as in `draftsmith generate --help`: {flags}")
        formatter.write(f"\n{_bold('Example:')} {self.epilog}\n")


@final
class PlainGroup(TyperGroup):
    """The top level, or one of `_GROUPS`: its help lists the commands in the order they were added."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command, or a group of those whose names begin with that word."""
        if cmd_name not in _GROUPS:
            return super().get_command(ctx, cmd_name)
        split = [(name.partition(" "), command) for name, command in self.commands.items()]
        return PlainGroup(
            name=cmd_name,
            commands={part: command for (first, _, part), command in split if first == cmd_name},
            help=_GROUPS[cmd_name],
            epilog="Each command explains itself with --help.",
        )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No words at all ask for help."""
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order they were added."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write description, usage, commands, options and where to start."""
        formatter.width = SCREEN_WIDTH
        formatter.write(f"{self.help}\n\n{_bold('Usage:')} {ctx.command_path} COMMAND [OPTIONS]\n")
        commands = [(name, self.commands[name].help or "") for name in self.list_commands(ctx)]
        options = [_option_row(param) for param in self.get_params(ctx)]
        for name, rows in (("Commands", commands), (_LAST_SECTION, options)):
            formatter.write(f"\n{_bold(name + ':')}\n")
            formatter.indent()
            formatter.write_dl(rows)
            formatter.dedent()
        formatter.write(f"\n{self.epilog}\n")


def _option_row(param: Any) -> tuple[str, str]:
    long = next(flag for flag in param.opts if flag.startswith("--"))
    short = next((f"{flag}, " for flag in param.opts if len(flag) == 2), "    ")
    text = param.help or ""
    if param.required:
        text += " (required)"
    elif not param.is_flag and param.default not in (None, "", []):
        text += f" [{param.default}]"
    return f"{short}{long} {param.metavar or ''}".rstrip(), text


def _bold(text: str) -> str:
    return typer.style(text, bold=True)


def add_command(
    app: typer.Typer,
    name: str,
    options_class: type,
    target: str,
    *,
    text: str,
    example: str,
    elsewhere: tuple[str, ...] = (),
) -> None:
    """Add a command whose options are `options_class` and whose work is `target` ("module:function").

    The function gets one instance of the class and returns the exit code. `elsewhere`: options, by the names of their
    fields, that the help only names.
    """

    def callback(**values: Any) -> int:
        module_name, _, function_name = target.partition(":")
        run: Callable[[Any], int] = getattr(importlib.import_module(module_name), function_name)
        try:
            code = run(options_class(**values))
            sys.stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes stdout once more when it exits: give it somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_GONE
        return code

    hints = typing.get_type_hints(options_class, include_extras=True)
    parameters = [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=_default(item), annotation=hints[item.name]
        )
        for item in dataclasses.fields(options_class)
    ]
    # typer reads a callback's signature and annotations; ours are those of the dataclass.
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = hints
    made = type("Command", (SectionedCommand,), {"elsewhere": elsewhere})
    app.command(name, cls=made, help=text, epilog=example)(callback)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default is not dataclasses.MISSING:
        return item.default
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return inspect.Parameter.empty
