"""Options of `draftsmith train` as a frozen dataclass; None stands for what recipe or method say.

Called by `app` and `cli.train`. Invariants: nothing heavy is imported here; a field named like one of
`TrainingSettings` is that setting, and its help shows that class's default.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from draftsmith.cli.options import JsonOption
from draftsmith.training.settings import TrainingSettings

_WHAT = "What"
_RUN = "Run"
_MACHINE = "Machine and output"

_DEFAULTS = {item.name: item.default for item in dataclasses.fields(TrainingSettings)}


def _option(flag: str, metavar: str, text: str, panel: str, *, short: str | None = None) -> Any:
    default = _DEFAULTS.get(flag.removeprefix("--").replace("-", "_"))
    shown = (
        f" [{default:g}]" if isinstance(default, float | int) else f" [{default}]" if isinstance(default, str) else ""
    )
    flags = (flag, short) if short else (flag,)
    return Option(*flags, metavar=metavar, help=text + shown, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JsonOption):
    """Options of `draftsmith train`."""

    recipe: Annotated[Path | None, Argument(metavar="[RECIPE.yaml]")] = None
    method: Annotated[str | None, _option("--method", "NAME", "Drafter to train, as eagle3", _WHAT)] = None
    model: Annotated[str | None, _option("--model", "NAME", "The target", _WHAT, short="-m")] = None
    data: Annotated[Path | None, _option("--data", "DIR", "Texts of `data prepare`", _WHAT)] = None
    output: Annotated[Path | None, _option("--output", "DIR", "Drafter to write", _WHAT, short="-o")] = None
    set: Annotated[
        list[str], Option("--set", metavar="CHANGE", help="Architecture, KEY=VALUE; repeatable", rich_help_panel=_WHAT)
    ] = field(default_factory=list)
    init: Annotated[Path | None, _option("--init", "DIR", "Start from a trained drafter", _WHAT)] = None
    draft_vocab: Annotated[int | None, _option("--draft-vocab", "N", "Tokens it can draft [all]", _WHAT)] = None
    loss: Annotated[str | None, _option("--loss", "NAME", "kl, lk_hybrid, ... [the method's]", _WHAT)] = None
    decay: Annotated[float | None, _option("--decay", "X", "Weight of each next depth [method's]", _WHAT)] = None
    depths: Annotated[int | None, _option("--depths", "K", "Depths trained [the method's]", _WHAT)] = None
    passes: Annotated[int | None, _option("--passes", "N", "Over the data [1]", _RUN)] = None
    steps: Annotated[int | None, _option("--steps", "N", "At most", _RUN)] = None
    max_seconds: Annotated[float | None, _option("--max-seconds", "S", "At most", _RUN)] = None
    batch_tokens: Annotated[int | None, _option("--batch-tokens", "N", "Of one forward", _RUN)] = None
    accumulate: Annotated[int | None, _option("--accumulate", "N", "Forwards of a step", _RUN)] = None
    max_len: Annotated[int | None, _option("--max-len", "N", "Leave longer texts out", _RUN)] = None
    lr: Annotated[float | None, _option("--lr", "X", "Peak learning rate", _RUN)] = None
    warmup: Annotated[float | None, _option("--warmup", "X", "Share of the run to reach it", _RUN)] = None
    floor: Annotated[float | None, _option("--floor", "X", "Share of it at the end", _RUN)] = None
    on_policy: Annotated[float | None, _option("--on-policy", "X", "Share of own answers", _RUN)] = None
    refresh: Annotated[int | None, _option("--refresh", "N", "Steps until they are anew", _RUN)] = None
    write_temperature: Annotated[float | None, _option("--write-temperature", "T", "Of them", _RUN)] = None
    weight_decay: Annotated[float | None, _option("--weight-decay", "X", "Of matrices", _RUN)] = None
    clip: Annotated[float | None, _option("--clip", "X", "Largest norm of the gradient", _RUN)] = None
    seed: Annotated[int | None, _option("--seed", "S", "Weights and order", _RUN, short="-s")] = None
    compute: Annotated[str | None, _option("--compute", "TYPE", "Or bfloat16:", _RUN)] = None
    cache: Annotated[Path | None, _option("--cache", "DIR", "Keep the target's features", _MACHINE)] = None
    save_every: Annotated[float | None, _option("--save-every", "S", "Seconds between states", _MACHINE)] = None
    validate_every: Annotated[int | None, _option("--validate-every", "N", "Steps [a tenth]", _MACHINE)] = None
    validation_texts: Annotated[int | None, _option("--validation-texts", "N", "At most", _MACHINE)] = None
    live_texts: Annotated[int | None, _option("--live-texts", "N", "Check with the engine", _MACHINE)] = None
    dtype: Annotated[str | None, _option("--dtype", "TYPE", "Of the weights written", _MACHINE)] = None
    backend: Annotated[str | None, _option("--backend", "NAME", "Of the target", _MACHINE)] = None
    threads: Annotated[int | None, _option("--threads", "N", "CPU threads [all cores]", _MACHINE)] = None
    plan: Annotated[bool, Option("--plan", help="Say what it takes and stop", rich_help_panel=_MACHINE)] = False
    force: Annotated[bool, Option("--force", help="Begin anew, replace all", rich_help_panel=_MACHINE)] = False
