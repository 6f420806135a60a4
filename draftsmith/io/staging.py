"""Directories that appear whole or not at all.

Used by whatever writes several files that belong together (prepared corpora, trained drafters). Invariant: at the
final path there is at every moment what was there before, or all of the new, or for an instant nothing; what a failed
or killed writer leaves behind is a hidden directory beside it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """A fresh directory that takes the place of `path` when the block ends well, and goes when it does not.

    Its files reach the disk first. Raises `OSError` as the system does.
    """
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
    path.rename(older / path.name)
    staging.rename(path)
    shutil.rmtree(older, ignore_errors=True)
