"""A pytest plugin (`-p tests.drafters.instrumented_native`) that tests another build of `draftsmith._native`.

Used by `make sanitize`; the environment variable DRAFTSMITH_NATIVE names the build. Invariant: the tests run
with exactly that file or not at all.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import draftsmith

_path = os.path.realpath(os.environ["DRAFTSMITH_NATIVE"])
_spec = importlib.util.spec_from_file_location("draftsmith._native", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules["draftsmith._native"] = _module
draftsmith._native = _module  # type: ignore[attr-defined]


def pytest_report_header() -> str:
    """Say which build is tested."""
    return f"native extension under test: {_path}"
