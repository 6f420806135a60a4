"""Plain tables of names to lazily imported classes, and the one grammar that selects from them.

Called by the engine, the benchmark and the command line, so that none of them knows a drafter,
controller, backend or arm by name. A selection reads `NAME[:key=value]*` or
`my_module:MyClass[:key=value]*`; keys are the fields of the class's `Options` dataclass. A value may hold
colons: what follows one belongs to it unless it reads like another `key=value`. In names and keys `-` and `_` are
the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from draftsmith.errors import OptionError

DRAFTERS: Mapping[str, str] = types.MappingProxyType(
    {
        "auto": "draftsmith.drafters.auto:AutoChoice",
        "none": "draftsmith.drafters.none:NoDrafter",
        "ngram": "draftsmith.drafters.ngram:NgramDrafter",
        "suffix": "draftsmith.drafters.suffix:SuffixDrafter",
        "draft_model": "draftsmith.drafters.draft_model:ModelDrafter",
        "hybrid": "draftsmith.drafters.hybrid:HybridDrafter",
        "medusa": "draftsmith.drafters.medusa:MedusaDrafter",
        "medusa2": "draftsmith.drafters.medusa2:Medusa2Drafter",
        "hydra": "draftsmith.drafters.hydra:HydraDrafter",
        "mlp_speculator": "draftsmith.drafters.mlp_speculator:MlpSpeculatorDrafter",
        "gloeckle": "draftsmith.drafters.gloeckle:GloeckleDrafter",
        "eagle1": "draftsmith.drafters.eagle1:Eagle1Drafter",
        "eagle2": "draftsmith.drafters.eagle1:Eagle2Drafter",
        "eagle3": "draftsmith.drafters.eagle3:Eagle3Drafter",
        "mtp": "draftsmith.drafters.mtp:MtpDrafter",
        "synthetic": "draftsmith.drafters.synthetic:SyntheticDrafter",
    }
)
CONTROLLERS: Mapping[str, str] = types.MappingProxyType(
    {
        "fixed": "draftsmith.control.fixed:FixedController",
        "ema": "draftsmith.control.ema:EmaController",
        "heuristic": "draftsmith.control.heuristic:HeuristicController",
        "bandit": "draftsmith.control.bandit:BanditController",
        "prefix-scheduler": "draftsmith.control.prefix_scheduler:PrefixSchedulerController",
        "goodput": "draftsmith.control.goodput:GoodputController",
        "auto": "draftsmith.control.goodput:GoodputController",
    }
)
RULES: Mapping[str, str] = types.MappingProxyType(
    {
        "typical": "draftsmith.core.lossy:TypicalAcceptance",
        "lenience": "draftsmith.core.lossy:Lenience",
        "adasd": "draftsmith.core.adasd:AdaSD",
        "asd": "draftsmith.core.asd:ApproximateVerification",
        "synthetic": "draftsmith.core.synthetic:SyntheticAcceptance",
    }
)
"""Verification rules that do not keep the target's law; the others are `core.types.Rule`."""
BACKENDS: Mapping[str, str] = types.MappingProxyType(
    {
        "reference": "draftsmith.models.reference:ReferenceBackend",
        "native": "draftsmith.models.native:NativeBackend",
    }
)
ARMS: Mapping[str, str] = types.MappingProxyType(
    {
        "llama_cpp": "draftsmith.bench.peer_arms:LlamaCppArm",
        "transformers": "draftsmith.bench.peer_arms:TransformersArm",
        "openvino": "draftsmith.bench.peer_arms:OpenVinoArm",
        "endpoint": "draftsmith.bench.endpoint_arm:EndpointArm",
    }
)
"""Other engines that a benchmark runs beside this one."""
LISTED: Mapping[str, Mapping[str, str]] = types.MappingProxyType(
    {"drafter": DRAFTERS, "controller": CONTROLLERS, "rule": RULES}
)
"""The tables that `draftsmith options` shows, by the flag that takes their names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """A class chosen from a table, and its options as written."""

    text: str
    target: str
    options: Mapping[str, str]


def parse_selection(text: str, table: Mapping[str, str], what: str) -> Selection:
    """Read `NAME[:key=value]*` or `module:Class[:key=value]*`.

    Raises `OptionError` for an unknown name or a part that is not `key=value`.
    """
    head, *parts = text.split(":")
    name = known_name(head, table)
    if name is not None:
        target = table[name]
    elif parts and parts[0].isidentifier():
        target = f"{head}:{parts.pop(0)}"
    else:
        raise OptionError(
            f"unknown {what} {head!r}: {did_you_mean(head, table)}known are {', '.join(table)}; your own is written "
            "module:Class"
        )
    options: dict[str, str] = {}
    key = None
    for part in parts:
        spelled, equals, value = part.partition("=")
        name = spelled.replace("-", "_")
        if equals and name.isidentifier():
            key, options[name] = name, value
        elif key is not None:
            options[key] += f":{part}"
        else:
            raise OptionError(f"{what} {text!r}: {part!r} is not of the form key=value")
    return Selection(text=text, target=target, options=options)


def known_name(name: str, known: Iterable[str]) -> str | None:
    """The name as it is known, whether `-` or `_` was written; None for an unknown one."""
    return {item.replace("-", "_"): item for item in known}.get(name.replace("-", "_"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to put into a message where a known name is spelled nearly so, else nothing."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def load_class(selection: Selection) -> type:
    """Import the class a selection names. Raises `OptionError` when it is not there or is not a class."""
    module_name, _, class_name = selection.target.partition(":")
    try:
        loaded = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise OptionError(f"cannot load {selection.target}: {str(error) or type(error).__name__}") from error
    if not isinstance(loaded, type):
        raise OptionError(f"{selection.target} is not a class; your own is written module:Class")
    return loaded


def read_options(options_class: type, values: Mapping[str, str], what: str) -> Any:
    """Build a frozen options dataclass from strings; `OptionError` names unknown or malformed keys.

    `what`: the kind and the selection, as in "drafter ngram:max_draft=3".
    """
    hints = typing.get_type_hints(options_class)
    fields = dataclasses.fields(options_class)
    known = [item.name for item in fields]
    kind, text = what.partition(" ")[0], what.split(" ", 1)[-1]
    name = text.partition(":")[0]
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            allowed = ", ".join(known) or "no options"
            listed = known_name(name, LISTED.get(kind, ()))
            hint = f"; see draftsmith options {listed}" if listed else ""
            raise OptionError(f"{what}: unknown option {key!r}; {did_you_mean(key, known)}allowed: {allowed}{hint}")
        converted[key] = _convert(value, hints[key], f"{what}: option {key}")
    if lacking := [item.name for item in fields if is_required(item) and item.name not in converted]:
        spelled = "".join(f":{name}=VALUE" for name in lacking)
        raise OptionError(f"{what} needs {' and '.join(lacking)}; write {text}{spelled}")
    return options_class(**converted)


def is_required(item: dataclasses.Field[Any]) -> bool:
    """Whether an option has no default."""
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def kind_of(hint: Any) -> str:
    """What a value of a type is called."""
    kind, may_be_none = _kind(hint)
    if typing.get_origin(kind) is tuple:
        called = f"{kind_of(typing.get_args(kind)[0])}s with commas between"
    else:
        called = _KINDS.get(kind, kind.__name__)
    return f"{called}, or none" if may_be_none else called


_KINDS: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "whole number", float: "number", str: "text"}
)


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type beside None, and whether None is allowed."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    parts = typing.get_args(hint)
    return next(part for part in parts if part is not types.NoneType), types.NoneType in parts


def _convert(value: str, hint: Any, where: str) -> Any:
    """The value as its field's type: a plain one, or a tuple of them with commas between."""
    kind, may_be_none = _kind(hint)
    if value == "none" and may_be_none:
        return None
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if typing.get_origin(kind) is tuple:
            return tuple(_plain(typing.get_args(kind)[0], part) for part in value.split(","))
        return _plain(kind, value)
    except (ValueError, KeyError) as error:
        if kind is bool:
            told = "neither true nor false"
        elif typing.get_origin(kind) is tuple:
            told = f"not a list of {kind_of(kind)}"
        else:
            told = f"not a {kind_of(kind)}"
        raise OptionError(f"{where}: {value!r} is {told}") from error


def _plain(kind: Any, text: str) -> Any:
    """One value. Of numbers a finite one: range checks see no NaN, and no option has a meaning for infinity."""
    value = kind(text)
    if kind is float and not math.isfinite(value):
        raise ValueError("not finite")
    return value
