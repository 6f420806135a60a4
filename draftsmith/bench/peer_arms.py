"""The arms of other engines on this machine: llama.cpp, transformers, OpenVINO GenAI, each a worker process.

Made by `arms.make_arm` from selections such as `llama_cpp:python=PEERS/bin/python:model=FILE:draft=lookup:10`; how to
install the engines is in `benchmarks/peers/README.md`. Invariant: all of them get token ids, a fresh context per
request, the same threads and the same end tokens; what an engine does of its own accord is told in its description.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, final

from draftsmith.bench.arms import MOST_TIMEOUT, Description, RunInfo
from draftsmith.bench.worker_arm import WorkerArm, WorkerSettings
from draftsmith.bench.worker_process import SCRIPTS
from draftsmith.errors import OptionError, UserError
from draftsmith.io.gguf_header import read_header


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """Options that all of them have.

    `model`: a file, or a directory where the engine takes one. `python`: interpreter of the environment the engine is
    installed in; this one's by default. `draft`: "none" or "lookup:K" for the engine's own prompt lookup of K tokens,
    and what else the engine knows. `threads`: the run's by default. `timeout`: most seconds for loading and for one
    request. `log`: a file that gets what the engine prints.
    """

    model: str = ""
    python: str = sys.executable
    draft: str = "none"
    threads: int | None = None
    timeout: float = 600.0
    log: str | None = None

    drafts: ClassVar[tuple[str, ...]] = ("lookup",)

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("this arm needs a model: write model=FILE")
        if not Path(self.model).expanduser().exists():
            raise OptionError(f"model={self.model}: there is no such file")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"threads is {self.threads}; it must be at least 1")
        if not 0 < self.timeout <= MOST_TIMEOUT:
            raise OptionError(f"timeout is {self.timeout:g}; it must be above 0 and at most {MOST_TIMEOUT:g} s (a day)")
        kind, _, rest = self.draft.partition(":")
        if self.draft != "none" and (kind not in self.drafts or not self._is_whole(kind, rest)):
            allowed = ", ".join(f"{kind}:{'MODEL' if kind == 'assistant' else 'K'}" for kind in self.drafts)
            raise OptionError(f"draft is {self.draft!r}; allowed: none, {allowed}")

    def _is_whole(self, kind: str, rest: str) -> bool:
        return bool(rest) if kind == "assistant" else rest.isdigit() and int(rest) > 0


class PeerArm(WorkerArm):
    """What these engines have in common."""

    Options: ClassVar[type[PeerOptions]] = PeerOptions
    script: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, name: str, options: PeerOptions, info: RunInfo) -> None:
        self._options = options
        threads = options.threads or info.threads
        log = Path(options.log).expanduser() if options.log else None
        settings = WorkerSettings(
            # Not resolved: an environment's interpreter is a link, and knows its environment by that.
            python=str(Path(options.python).expanduser()),
            script=SCRIPTS / self.script,
            threads=threads,
            timeout=options.timeout,
            log=log,
        )
        super().__init__(name, settings, info)

    @classmethod
    def create(cls, name: str, options: PeerOptions, info: RunInfo) -> Self:
        """Make the arm a selection names."""
        return cls(name, options, info)

    def load_arguments(self) -> Mapping[str, Any]:
        path = str(Path(self._options.model).expanduser())
        return {"path": path, "threads": self._settings.threads, "n_ctx": self._info.context_len}

    def describe(self, found: Mapping[str, Any]) -> Description:
        more = {"draft": self._options.draft, "threads": self._settings.threads}
        return Description(
            engine=f"{self.title} {found.get('version', '')}".strip(),
            model=Path(self._options.model).name,
            bits_per_weight=found.get("bits_per_weight"),
            details={**found, **more},
        )


@dataclass(frozen=True, kw_only=True)
class LlamaCppOptions(PeerOptions):
    """`draft`: also "api:K", the same lookup through the high-level class users call. `tune`: choose flash attention by
    measuring when the file is loaded; else llama.cpp decides.
    """

    tune: bool = True

    drafts: ClassVar[tuple[str, ...]] = ("lookup", "api")


@final
class LlamaCppArm(PeerArm):
    """llama.cpp through llama-cpp-python's C functions."""

    Options = LlamaCppOptions
    script = "llama_cpp_worker.py"
    title = "llama-cpp-python"

    def load_arguments(self) -> Mapping[str, Any]:
        assert isinstance(self._options, LlamaCppOptions)
        return {**super().load_arguments(), "tune": self._options.tune}

    def stream_arguments(self) -> Mapping[str, Any]:
        return {"draft": self._options.draft}


@dataclass(frozen=True, kw_only=True)
class TransformersOptions(PeerOptions):
    """`draft`: also "assistant:MODEL", a directory or file. `dtype`: of weights and arithmetic, float32 or bfloat16."""

    dtype: str = "float32"

    drafts: ClassVar[tuple[str, ...]] = ("lookup", "assistant")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("float32", "bfloat16"):
            raise OptionError(f"transformers: dtype is {self.dtype!r}; allowed: float32, bfloat16")


@final
class TransformersArm(PeerArm):
    """Hugging Face transformers' own `generate`."""

    Options = TransformersOptions
    script = "transformers_worker.py"
    title = "transformers"

    def load_arguments(self) -> Mapping[str, Any]:
        assert isinstance(self._options, TransformersOptions)
        return {**super().load_arguments(), "draft": self._options.draft, "dtype": self._options.dtype}


@final
class OpenVinoArm(PeerArm):
    """OpenVINO GenAI, which converts the file when it reads it."""

    script = "openvino_worker.py"
    title = "OpenVINO GenAI"

    def load_arguments(self) -> Mapping[str, Any]:
        return {**super().load_arguments(), "draft": self._options.draft}

    def stream_arguments(self) -> Mapping[str, Any]:
        return {"draft": self._options.draft}

    def describe(self, found: Mapping[str, Any]) -> Description:
        # It does not tell what it makes of the weights, so these are the file's bits.
        bits = _file_bits(Path(self._options.model).expanduser())
        return super().describe({**found, "bits_per_weight": bits, "bits_per_weight_of": "the file"})


def _file_bits(path: Path) -> float | None:
    """Bits per weight of a GGUF file's tensors; None for what this package cannot read."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            tensors = read_header(data, path).tensors.values()
    except (OSError, UserError, ValueError):
        return None
    return 8 * sum(tensor.nbytes for tensor in tensors) / max(sum(math.prod(tensor.shape) for tensor in tensors), 1)
