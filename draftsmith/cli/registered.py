"""`draftsmith options`: which drafters, controllers and rules there are, and what each can be told.

Called by `app`. Everything comes from the classes in the registry: a name's summary is the first sentence of its
class's docstring, an option's meaning what follows "`option`:" in the docstring of the dataclass that holds it.
Invariant: nothing is said here that the classes do not say themselves.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Collection, Mapping
from typing import Any

from draftsmith.cli.console import OutputConsole
from draftsmith.cli.options import RegisteredOptions
from draftsmith.core.types import Rule
from draftsmith.errors import OptionError
from draftsmith.registry import LISTED, did_you_mean, is_required, kind_of, known_name, load_class, parse_selection

_EXACT = tuple(rule.value for rule in Rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionText:
    """One option. `default`: as it is written, None for one that must be given."""

    name: str
    type: str
    default: str | None
    meaning: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registered:
    """One name. `group`: drafter, controller or rule, whose flag takes it. `usage`: how it is written."""

    group: str
    name: str
    summary: str
    usage: str
    options: tuple[OptionText, ...]


def run(options: RegisteredOptions) -> int:
    """Run the command; returns the exit code."""
    found = [registered(group, name) for group, name in chosen(options.name)]
    if options.json:
        print(json.dumps({"names": [dataclasses.asdict(item) for item in found]}, ensure_ascii=False))
        return 0
    console = OutputConsole(sys.stdout)
    if options.name is None:
        _print_names(console, found)
    else:
        for place, item in enumerate(found):
            _print_options(console, item, first=place == 0)
    return 0


def names_of(group: str) -> Collection[str]:
    """The names of a group; of rules the exact ones first."""
    return (*_EXACT, *LISTED[group]) if group == "rule" else tuple(LISTED[group])


def chosen(asked: str | None) -> list[tuple[str, str]]:
    """Groups and names meant by NAME or GROUP:NAME; all without one. Raises `OptionError` for an unknown one."""
    if asked is None:
        return [(group, name) for group in LISTED for name in names_of(group)]
    group, colon, wanted = asked.partition(":")
    groups, wanted = ((group,), wanted) if colon and group in LISTED else (tuple(LISTED), asked)
    found = [(group, known_name(wanted, names_of(group))) for group in groups]
    if meant := [(group, name) for group, name in found if name is not None]:
        return meant
    guess = did_you_mean(wanted, {name: None for group in groups for name in names_of(group)})
    raise OptionError(f"no drafter, controller or rule is called {asked!r}: {guess}draftsmith options lists them")


def registered(group: str, name: str) -> Registered:
    """What a name's classes say of it."""
    if group == "rule" and name in _EXACT:
        return Registered(
            group=group, name=name, summary=meanings(Rule.__doc__, _EXACT)[name], usage=f"--rule {name}", options=()
        )
    loaded: Any = load_class(parse_selection(name, LISTED[group], group))
    options = options_of(loaded if group == "rule" else loaded.Options)
    return Registered(
        group=group,
        name=name,
        summary=first_sentence(loaded.__doc__),
        usage=f"--{group} {name}{_example(options)}",
        options=options,
    )


def options_of(options_class: type) -> tuple[OptionText, ...]:
    """The fields of an options dataclass, in their order."""
    hints = typing.get_type_hints(options_class)
    fields = dataclasses.fields(options_class)
    names = [item.name for item in fields]
    told: dict[str, str] = {}
    for base in reversed(
        options_class.__mro__
    ):  # a class without a word of its own on an option means what its base does
        told |= meanings(base.__doc__, names)
    return tuple(
        OptionText(
            name=item.name,
            type=kind_of(hints[item.name]),
            default=None if is_required(item) else _written(item.default),
            meaning=told.get(item.name, ""),
        )
        for item in fields
    )


def meanings(docstring: str | None, names: Collection[str]) -> Mapping[str, str]:
    """What follows each "`name`: ", up to the next one or the end of the paragraph."""
    found: dict[str, str] = {}
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        _, *parts = re.split(r"`(\w+)`: ", " ".join(paragraph.split()))
        for name, meaning in zip(parts[::2], parts[1::2], strict=True):
            if name in names:
                found[name] = meaning.strip().removesuffix(".")
    return found


def first_sentence(docstring: str | None) -> str:
    """Up to the first full stop that a new sentence follows; without the stop."""
    paragraph = " ".join(inspect.cleandoc(docstring or "").partition("\n\n")[0].split())
    return re.split(r"\.(?= [A-Z`])", paragraph, maxsplit=1)[0].removesuffix(".")


def _written(default: Any) -> str:
    """A default as it is written on the command line; "empty" for an empty text, which no reader would see."""
    if isinstance(default, bool) or default is None:
        return str(default).lower()
    return str(default) or "empty"


def _example(options: Collection[OptionText]) -> str:
    """What follows a name: all that must be given, else its first option."""
    needed = [item for item in options if item.default is None] or list(options)[:1]
    values = {item.name: "VALUE" if item.default in (None, "none", "empty") else item.default for item in needed}
    return "".join(f":{name}={value}" for name, value in values.items())


def _print_names(console: OutputConsole, found: Collection[Registered]) -> None:
    from rich.table import Table

    width = max(len(item.name) for item in found)
    for group in LISTED:
        console.print(f"{group.capitalize()}s, after --{group}:", style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(width=width + 2, no_wrap=True)
        table.add_column(overflow="fold")
        for item in found:
            if item.group == group:
                table.add_row(f"  {item.name}", item.summary)
        console.print(table)
        console.print()
    console.print("draftsmith options NAME tells what each can be told; it is written NAME:option=value:option=value.")


def _print_options(console: OutputConsole, item: Registered, *, first: bool) -> None:
    from rich.table import Table

    if not first:
        console.print()
    console.print(f"{item.group} {item.name}: {item.summary}.")
    if not item.options:
        console.print(f"No options; written {item.usage}")
        return
    console.print(f"Written {item.usage}")
    console.print()
    table = Table(box=None, pad_edge=False)
    for heading in ("OPTION", "TYPE", "DEFAULT", "MEANING"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "OPTION")
    for option in item.options:
        table.add_row(option.name, option.type, option.default or "required", option.meaning)
    console.print(table)
