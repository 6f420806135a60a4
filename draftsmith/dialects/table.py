"""The table of dialects, and which one a checkpoint is of.

A plain table name -> "module:Class", read lazily by `convert` and the command line. Adding a dialect is one file and
one line here; the order is that of detection, the most telling signs first.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from draftsmith.dialects.dialect import Dialect
from draftsmith.dialects.published import Published
from draftsmith.errors import ModelFileError, OptionError
from draftsmith.registry import load_class, parse_selection

DIALECTS: Mapping[str, str] = types.MappingProxyType(
    {
        "eagle3-speculators": "draftsmith.dialects.eagle3_speculators:Eagle3Speculators",
        "eagle3": "draftsmith.dialects.eagle3:Eagle3",
        "mlp-speculator": "draftsmith.dialects.mlp_speculator:MlpSpeculator",
        "medusa-vllm": "draftsmith.dialects.medusa_vllm:MedusaVllm",
        "medusa": "draftsmith.dialects.medusa:Medusa",
        "medusa2": "draftsmith.dialects.medusa:Medusa2",
        "hydra": "draftsmith.dialects.hydra:Hydra",
        "mtp-deepseek": "draftsmith.dialects.mtp:MtpDeepSeek",
        "mtp-qwen": "draftsmith.dialects.mtp:MtpQwen",
        "mtp-mimo": "draftsmith.dialects.mtp:MtpMimo",
        "eagle1": "draftsmith.dialects.eagle1:Eagle1",
    }
)


def dialect_named(name: str) -> Dialect:
    """Raises `OptionError` for a name that is not in the table."""
    if name not in DIALECTS:
        raise OptionError(f"unknown dialect {name!r}: known are native, {', '.join(DIALECTS)}")
    dialect: Dialect = load_class(parse_selection(name, DIALECTS, "dialect"))()
    return dialect


def detect(published: Published) -> Dialect:
    """The dialect of a checkpoint. Raises `ModelFileError` when no sign of any is found."""
    for name in DIALECTS:
        dialect = dialect_named(name)
        if dialect.recognises(published):
            return dialect
    some = ", ".join(sorted(published.names)[:3])
    raise ModelFileError(
        f"{published.path}: no known drafter (tensors like {some}); say --from NAME, known are {', '.join(DIALECTS)}"
    )
