"""Where measured costs are kept: one JSON file per model file, backend, number of threads and processor.

Called by the engine when it is made and by `draftsmith calibrate`. The place is `$DRAFTSMITH_CACHE/costs`, else
`$XDG_CACHE_HOME/draftsmith/costs`, else `~/.cache/draftsmith/costs`. Invariant: a file is replaced whole or not at all,
and one that cannot be read is told of and left alone: nothing stops because of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftsmith.control.cost_table import CostTable
from draftsmith.errors import DataError, OptionError

logger = logging.getLogger(__name__)


def cost_directory() -> Path:
    """Where all of them are kept. Raises `OptionError` where nothing says which directory that is."""
    root, base = os.environ.get("DRAFTSMITH_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "costs"
    try:
        return (Path(base) if base else Path.home() / ".cache") / "draftsmith" / "costs"
    except RuntimeError as error:
        raise OptionError(
            "there is no home directory to keep costs in; name a directory in DRAFTSMITH_CACHE"
        ) from error


def check_cost_directory() -> None:
    """See that something can be kept there, before it is measured. Raises `OptionError`."""
    directory = cost_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(
            f"costs cannot be kept in {directory}: {error.strerror or error}; name a directory in DRAFTSMITH_CACHE"
        ) from error


def cost_file(identity: Mapping[str, Any]) -> Path:
    """The file for what `LoadedModel.identity` says. Raises `OptionError` as `cost_directory` does."""
    text = json.dumps(dict(identity), sort_keys=True)
    return cost_directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def read_costs(identity: Mapping[str, Any]) -> CostTable | None:
    """What was measured for a model, None if nothing was or it cannot be read."""
    if not identity:
        return None
    try:
        path = cost_file(identity)
    except OptionError:  # no directory to look in
        return None
    try:
        return CostTable.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("costs are not used: %s cannot be read (%s)", path, error.strerror or error)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or no table
        logger.warning("costs are not used: %s", error if isinstance(error, DataError) else f"{path} is damaged")
    return None


def write_costs(table: CostTable, path: Path) -> None:
    """Write a table whole. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(table.as_json(), indent=1), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
