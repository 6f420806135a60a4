"""What files hold, told apart quickly and wherever they lie.

Called where something measured with a model is kept for the next time. Invariants: names of directories and times take
no part, so a copy of a model is the same model; it takes well under a second, however large the files are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = 1 << 20
_BLOCK = 1 << 16
_NUM_BLOCKS = 64


FILE_FACTS = ("bytes", "digest")
"""Names of what `file_facts` tells."""


def file_facts(path: Path) -> Mapping[str, Any]:
    """Bytes and a digest of a model file, or of a directory's config and weights. Raises `OSError`.

    The digest covers the sizes, the first MiB of each file (what it is made of), and 64 blocks of 64 KiB spread evenly
    from beginning to end over each file (shared out among several, two of each at least). So it misses files of the
    same size that differ only between those blocks: a few weights edited by hand, not another training or quantisation.
    In a directory the files' names count too, else no name does.
    """
    files = [path] if path.is_file() else sorted([path / "config.json", *path.glob("*.safetensors")])
    files = [file for file in files if file.is_file()]
    digest = hashlib.sha256()
    total = 0
    for file in files:
        size = file.stat().st_size
        total += size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        num_blocks = max(_NUM_BLOCKS // len(files), 2)
        with file.open("rb") as stream:
            digest.update(stream.read(_HEAD))
            for number in range(num_blocks):
                stream.seek(max(size - _BLOCK, 0) * number // (num_blocks - 1))
                digest.update(stream.read(_BLOCK))
    return {"bytes": total, "digest": digest.hexdigest()}
