"""What a training run is told: one frozen dataclass that command line and recipe both fill.

Called by `cli.train`, read by everything in this package; nothing heavy is imported, so that help stays quick.
Invariants: a value that cannot work is refused here, before a model is loaded; `identity` holds whatever changes
the numbers of a run, so an interrupted run continues only under the settings it began with.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import OptionError

COMPUTE = ("float32", "bfloat16")
WEIGHT_TYPES = ("bfloat16", "float16", "float32")
# What a run may change when it is continued: where things are kept and how long it goes on.
_FREE = frozenset(
    {"output", "cache", "max_seconds", "save_every", "threads", "data", "live_texts", "feature_rows", "dtype"}
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """A run. Raises `OptionError` for values outside their range.

    `method`: a drafter of the table; `configure`: changes to its architecture. `init`: directory of a drafter of that
    method to start from, with its architecture and draft vocabulary. `draft_vocab`: size of the draft
    vocabulary, None for the target's whole one. `loss`, `decay`, `depths`: None takes the method's own.
    `passes` over the data or `steps` of the optimiser, whichever ends first; `max_seconds` ends both. `batch_tokens`:
    padded tokens of one forward; `accumulate`: forwards of one step, over all processes together. `max_len`: longer
    texts are left out. `warmup`: share of the run in which the rate rises to `lr`; it then falls along a cosine to
    `floor * lr`.
    `on_policy`: share of the batches whose answers the drafter writes itself, at `write_temperature` (0: greedy), anew
    every `refresh` steps.
    `clip`: largest norm of the gradient. `compute`: what matrix products round to; weights stay float32.
    `cache`: directory of the target's features, None scores the texts anew in every pass. `save_every`: seconds
    between states on disk. `validate_every`: steps between validations, None for ten of them in a run.
    `validation_texts`: most texts of one validation. `live_texts`: how many answers the engine writes to check the
    validation, 0 for none. `feature_rows`: most rows of one forward of the target. `dtype`: of the weights written.
    """

    method: str
    model: str
    data: Path
    output: Path
    configure: Mapping[str, str] = field(default_factory=dict)
    init: Path | None = None
    draft_vocab: int | None = None
    loss: str | None = None
    decay: float | None = None
    depths: int | None = None
    passes: int | None = None
    steps: int | None = None
    max_seconds: float | None = None
    batch_tokens: int = 2048
    accumulate: int = 1
    max_len: int = 2048
    lr: float = 5e-4
    warmup: float = 0.04
    floor: float = 0.05
    on_policy: float = 0.0
    refresh: int = 50
    write_temperature: float = 1.0
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    compute: str = "float32"
    cache: Path | None = None
    save_every: float = 300.0
    validate_every: int | None = None
    validation_texts: int = 100
    live_texts: int = 0
    feature_rows: int = 512
    dtype: str = "bfloat16"
    backend: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("method", "model"):
            if not getattr(self, name):
                raise OptionError(f"{name} is missing; say it with --{name}")
        least = {"draft_vocab": 1, "depths": 1, "passes": 1, "steps": 1, "batch_tokens": 1, "accumulate": 1,
                 "max_len": 3, "validate_every": 1, "validation_texts": 1, "feature_rows": 1, "live_texts": 0,
                 "seed": 0, "threads": 1, "refresh": 1}  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise OptionError(f"{name} is {value}; allowed: at least {low}")
        if self.seed >= 1 << 63:
            raise OptionError(f"seed is {self.seed}; allowed: below 2^63")
        for name in ("max_seconds", "lr", "clip", "save_every"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise OptionError(f"{name} is {value}; allowed: above 0")
        for name in ("warmup", "floor", "weight_decay", "on_policy"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is {getattr(self, name)}; allowed: 0 to 1")
        if self.decay is not None and not 0 < self.decay <= 1:
            raise OptionError(f"decay is {self.decay}; allowed: above 0 and up to 1")
        if self.write_temperature != 0 and not 1e-6 <= self.write_temperature < math.inf:
            raise OptionError(f"write_temperature is {self.write_temperature}; allowed: 0 or at least 1e-6")
        if self.compute not in COMPUTE:
            raise OptionError(f"compute is {self.compute!r}; allowed: {', '.join(COMPUTE)}")
        if self.init is not None and (self.configure or self.draft_vocab is not None):
            raise OptionError(f"{self.init} fixes architecture and draft vocabulary; leave out --set and --draft-vocab")
        if self.dtype not in WEIGHT_TYPES:
            raise OptionError(f"dtype is {self.dtype!r}; allowed: {', '.join(WEIGHT_TYPES)}")

    @property
    def state_dir(self) -> Path:
        """Where a run keeps what it needs to go on: beside the drafter, which appears whole at the end."""
        return self.output.with_name(f"{self.output.name}.state")

    @property
    def num_passes(self) -> int | None:
        """Passes over the data; None where only steps or seconds end the run."""
        if self.passes is None and self.steps is None and self.max_seconds is None:
            return 1
        return self.passes

    def as_plain(self) -> dict[str, Any]:
        """All settings as plain values, for a recipe, a log or a card."""
        plain = dataclasses.asdict(self)
        return {key: str(value) if isinstance(value, Path) else value for key, value in plain.items()}

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that decide a run's numbers."""
        return {key: value for key, value in self.as_plain().items() if key not in _FREE}


def settings_from(values: Mapping[str, Any], where: str) -> TrainingSettings:
    """Settings from plain values, as a recipe has them. Raises `OptionError` for unknown keys and wrong types."""
    fields = {item.name: item for item in dataclasses.fields(TrainingSettings)}
    taken: dict[str, Any] = {}
    for written, value in values.items():
        key = str(written).replace("-", "_")
        if key not in fields:
            raise OptionError(f"{where}: unknown key {str(written)!r}; {_advice(str(written), list(fields))}")
        taken[key] = _convert(value, str(fields[key].type), f"{where}: {'set' if key == 'configure' else written}")
    missing = [key for key in ("method", "model", "data", "output") if taken.get(key) is None]
    if missing:
        options = " and ".join(f"--{key}" for key in missing)
        raise OptionError(f"{where}: {options} must be given")
    return TrainingSettings(**taken)


def _advice(written: str, known: Sequence[str]) -> str:
    """What to write instead of a key that is unknown."""
    if written in ("plan", "force", "json"):
        return f"give --{written} on the command line"
    names = ["set" if name == "configure" else name.replace("_", "-") for name in known]
    near = difflib.get_close_matches(written.replace("_", "-"), names)
    return (f"nearest are {', '.join(near)}; " if near else "") + "see draftsmith train --help"


def _convert(value: Any, kind: str, where: str) -> Any:
    """A plain value as its field wants it; `kind` is the annotation as written."""
    if value is None and "None" in kind:
        return None
    kind = kind.removesuffix(" | None")
    if kind.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise OptionError(f"{where} is {value!r}; a mapping of keys to values is needed")
        return {str(key): _plain_text(item) for key, item in value.items()}
    if kind == "Path" and isinstance(value, str | Path) and str(value):
        return Path(value)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "float":
        number = _number(value)
        if number is not None:
            return number
    words = {"int": "a whole number", "float": "a number", "str": "a text", "Path": "a path"}
    raise OptionError(f"{where} is {value!r}; {words[kind]} is needed")


def _number(value: Any) -> float | None:
    """YAML reads 5e-4, without a point, as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _plain_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
