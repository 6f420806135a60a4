"""Tensors written to a safetensors file, with the system's own errors.

Used by whatever writes such files. Invariant: what the library reports as an error of its own kind, a full disk above
all, comes out as the `OSError` it is, naming the file.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors that share no memory. Raises `OSError`."""
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        reason = os.strerror(number) if found else " ".join(str(error).split())
        raise OSError(number, reason, str(path)) from error
