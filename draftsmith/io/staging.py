"""Directories, and files, that appear whole or not at all.

Used by whatever writes several files that belong together (prepared corpora, trained drafters). Invariant: at the
final path there is at every moment what was there before, or all of the new, or for an instant nothing; what a failed
or killed writer leaves behind is a hidden directory beside it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from draftsmith.errors import OptionError


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """A fresh directory that takes the place of `path` when the block ends well, and goes when it does not.

    Its files reach the disk first. Raises `OSError` as the system does, naming `path`.
    """
    try:
        with _staged(path) as staging:
            yield staging
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` when the block ends well, and goes when it does not."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield staging
        staging.chmod(0o755)
        for file in staging.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        _replace(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _replace(staging: Path, path: Path) -> None:
    """Put a directory in another's place; a directory cannot be renamed onto one that has files."""
    if not path.exists():
        staging.rename(path)
        return
    older = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        path.rename(older / path.name)
        staging.rename(path)
    finally:
        if not path.exists() and (older / path.name).exists():
            (older / path.name).rename(path)
        shutil.rmtree(older, ignore_errors=True)


def check_drafter_output(path: Path, *, is_drafter: Callable[[Path], bool]) -> None:
    """`check_output` of a drafter."""
    check_output(path, what="drafter", is_ours=is_drafter)


def check_output(path: Path, *, what: str, is_ours: Callable[[Path], bool]) -> None:
    """Raise `OptionError` for a place that must never be replaced, whatever the user allows.

    A file, the working directory or one above it, and a directory that holds files and no `what`.
    """
    if not path.name or path.name == ".." or Path.cwd().is_relative_to(path.resolve()):
        raise OptionError(f"output {path} is the working directory or one above it; give a directory of its own")
    if path.exists() and not path.is_dir():
        raise OptionError(f"output {path} is a file; give a directory")
    if path.exists() and any(path.iterdir()) and not is_ours(path):
        raise OptionError(f"output {path} exists and holds no {what}; give another")
