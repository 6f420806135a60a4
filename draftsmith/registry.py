"""Plain tables of names to lazily imported classes, and the one grammar that selects from them.

Called by the engine, the benchmark and the command line, so that none of them knows a drafter,
controller, backend or arm by name. A selection reads `NAME[:key=value]*` or
`my_module:MyClass[:key=value]*`; keys are the fields of the class's `Options` dataclass. A value may hold
colons: what follows one belongs to it unless it reads like another `key=value`.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
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
    if head in table:
        target = table[head]
    elif parts and parts[0].isidentifier():
        target = f"{head}:{parts.pop(0)}"
    else:
        raise OptionError(f"unknown {what} {head!r}: known are {', '.join(table)}; your own is written module:Class")
    options: dict[str, str] = {}
    key = None
    for part in parts:
        name, equals, value = part.partition("=")
        if equals and name.isidentifier():
            key, options[name] = name, value
        elif key is not None:
            options[key] += f":{part}"
        else:
            raise OptionError(f"{what} {text!r}: {part!r} is not of the form key=value")
    return Selection(text=text, target=target, options=options)


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
    """Build a frozen options dataclass from strings; `OptionError` names unknown or malformed keys."""
    hints = typing.get_type_hints(options_class)
    fields = dataclasses.fields(options_class)
    known = [item.name for item in fields]
    converted: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            allowed = ", ".join(known) or "no options"
            raise OptionError(f"{what}: unknown option {key!r}; allowed: {allowed}")
        converted[key] = _convert(value, hints[key], f"{what}: option {key}")
    has_none = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [item.name for item in fields if (item.default, item.default_factory) == has_none]
    if lacking := [name for name in missing if name not in converted]:
        spelled = "".join(f":{name}=VALUE" for name in lacking)
        raise OptionError(f"{what} needs {' and '.join(lacking)}; write {what.split()[-1]}{spelled}")
    return options_class(**converted)


def _convert(value: str, hint: Any, where: str) -> Any:
    """The value as its field's type: a plain one, or a tuple of them with commas between."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(hint) if is_union else (hint,)) if kind is not types.NoneType]
    if value == "none" and types.NoneType in typing.get_args(hint):
        return None
    try:
        if kinds[0] is bool:
            return {"true": True, "false": False}[value.lower()]
        if typing.get_origin(kinds[0]) is tuple:
            return tuple(typing.get_args(kinds[0])[0](part) for part in value.split(","))
        converted = kinds[0](value)
        if converted != converted:
            raise ValueError("not a number")
        return converted
    except (ValueError, KeyError) as error:
        raise OptionError(f"{where}: {value!r} is not a {_named(kinds[0])}") from error


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of {typing.get_args(kind)[0].__name__}s with commas between"
    return str(kind.__name__)
