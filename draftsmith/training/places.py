"""Where a run writes: checked before anything is loaded, held by one run at a time, emptied only by whoever holds it.

Called by `cli.train` and `training.run`. Invariant: nothing that is not of this run, or that another run is at work on,
is written or deleted.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.drafters.checkpoint import is_drafter
from draftsmith.errors import OptionError
from draftsmith.io.staging import check_drafter_output
from draftsmith.training.settings import TrainingSettings
from draftsmith.training.state import LAST

_LOCK = "lock"


def check_places(settings: TrainingSettings, *, force: bool) -> None:
    """Raise `OptionError` for an output that would overwrite something not of this run, or a place that cannot be."""
    output = settings.output
    check_drafter_output(output, is_drafter=is_drafter)
    _check_place("output", output)
    _check_place("state", settings.state_dir)
    if settings.cache is not None:
        _check_place("cache", settings.cache)
    if output.exists() and not force and not (settings.state_dir / LAST).exists():
        raise OptionError(f"output {output} exists; give another, or --force to replace it")


def _check_place(name: str, path: Path) -> None:
    """Whether a directory can be made there, as far as looking tells."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        raise OptionError(f"{name} {path}: cannot be written there: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OptionError(f"{name} {path}: cannot be written there: {there} does not let you")


@contextmanager
def alone_in(settings: TrainingSettings, *, restart: bool = False) -> Iterator[None]:
    """Inside, no other run works in the state's directory, which `restart` empties.

    Raises `OptionError` when another does, or when the directory cannot be made or written.
    """
    state = settings.state_dir
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / _LOCK).open("wb")
    except OSError as error:
        raise OptionError(f"output {settings.output}: cannot be written there: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(f"another run is at work in {state}; give another --output") from error
        if restart:
            _empty(state)
        yield


def _empty(state: Path) -> None:
    """Delete everything but the lock, which others look for."""
    try:
        for found in state.iterdir():
            if found.is_dir() and not found.is_symlink():
                shutil.rmtree(found)
            elif found.name != _LOCK:
                found.unlink()
    except OSError as error:
        raise OptionError(f"{state}: cannot be emptied: {error.strerror or error}") from error
