"""`draftsmith models`: the models known by name or lying about, and the architectures that load.

Called by `app`. Invariant: nothing is downloaded or loaded; only names, sizes and paths are looked at.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from draftsmith.cli.options import ModelsOptions
from draftsmith.io.catalogue import ListedModel, list_models
from draftsmith.models.spec_defaults import ARCHITECTURES


def run(options: ModelsOptions) -> int:
    """Run the command; returns the exit code."""
    models = list_models()
    if options.json:
        print(json.dumps({"models": [_record(model) for model in models], "architectures": list(ARCHITECTURES)}))
        return 0
    from rich.table import Table

    from draftsmith.cli.console import OutputConsole

    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "SIZE", "LICENCE", "STATUS"):
        table.add_column(heading, justify="right" if heading == "SIZE" else "left", overflow="fold")
    for model in models:
        status = "ready" if model.path else f"not here: {model.hint}"
        table.add_row(model.name, _size(model.size_bytes), model.licence or "-", status)
    console = OutputConsole(sys.stdout)
    console.print(table)
    console.print("\nAlso a .gguf file, a directory with config.json and *.safetensors, or a hub id.")
    console.print(f"Architectures: {', '.join(ARCHITECTURES)}")
    return 0


def _record(model: ListedModel) -> dict[str, object]:
    return {**dataclasses.asdict(model), "path": str(model.path) if model.path else None}


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.0f} MB"
