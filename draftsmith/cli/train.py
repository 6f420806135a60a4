"""`draftsmith train`: train a drafter for a target, or go on with a run that was interrupted.

Called by `app`; puts together recipe, target, trainer and what the user sees. The trainer knows no engine, so the
live check is composed here. Exit codes: 0 trained; 130 stopped by Ctrl-C or SIGTERM, its state kept.
Invariant: what is wrong with options, data or places is told in one line before anything is written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.cli.console import note
from draftsmith.cli.interrupts import INTERRUPTED, stop_on_interrupt
from draftsmith.cli.train_options import TrainOptions
from draftsmith.cli.train_view import TrainView
from draftsmith.errors import DraftsmithError, OptionError, UnsupportedError
from draftsmith.training.settings import TrainingSettings, settings_from

if TYPE_CHECKING:
    from draftsmith.drafters.base import TargetInfo
    from draftsmith.engine.loading import LoadedModel
    from draftsmith.training.processes import Processes
    from draftsmith.training.run import Job
    from draftsmith.training.trainer import Trainer

_MISTAKE = 2
"""Exit code of a mistake, as `app` has it."""
_NOT_SETTINGS = frozenset({"recipe", "set", "plan", "force", "json"})


def run(options: TrainOptions) -> int:
    """Run the command; returns the exit code."""
    with _told_once(is_first=_is_first()):
        settings = settings_of(options)
        from draftsmith.drafters.checkpoint import module_class
        from draftsmith.training.places import check_places
        from draftsmith.training.processes import processes

        module_class(settings.method)
        check_places(settings, force=options.force)
    with processes() as together:
        return _run(settings, options, together)


def _run(settings: TrainingSettings, options: TrainOptions, together: Processes) -> int:
    from draftsmith.training.run import finish, prepare

    view = TrainView(quiet=not together.is_first, max_seconds=settings.max_seconds)
    with _told_once(together):
        model, target = load_target(settings)
        job = prepare(settings, target, together, model.identity)
    for line in job.notes:
        view.tell(line)
    if options.plan:
        return _print_plan(job, as_json=options.json) if together.is_first else 0
    trainer = _train(job, view, together, restart=options.force)
    if trainer is None:
        return INTERRUPTED
    if together.is_first:
        _conclude(finish(job, trainer), job, trainer, model, as_json=options.json)
    return 0


def _train(job: Job, view: TrainView, together: Processes, *, restart: bool) -> Trainer | None:
    """The trainer of a run that came to its end; None of one that was stopped, which has been told."""
    from draftsmith.training.run import carry_out
    from draftsmith.training.state import way_on

    try:
        with stop_on_interrupt(signal.SIGTERM) as stop, view, _told_once(together):
            listener = view.listener(lambda: stop.asked)
            trainer = carry_out(job, listener, together, tell=view.tell, restart=restart)
    except KeyboardInterrupt:
        view.tell(f"interrupted; {way_on(job.settings.state_dir)}")
        return None
    if trainer is None:
        view.tell(f"stopped while {job.settings.cache} was filled; the same command goes on from there")
    elif not trainer.finished:
        view.tell(f"stopped at step {trainer.progress.step}; the same command goes on from there")
        return None
    return trainer


def _is_first() -> bool:
    """Whether this process is the one that talks, before it has met the others that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextmanager
def _told_once(together: Processes | None = None, *, is_first: bool = True) -> Iterator[None]:
    """What several processes have to say is told by the first: the others end without a word."""
    try:
        yield
    except DraftsmithError as error:
        if not is_first or (together is not None and together.first_tells(error)):
            raise SystemExit(_MISTAKE) from error
        raise


def settings_of(options: TrainOptions) -> TrainingSettings:
    """Recipe and options together; an option that was given goes before the recipe. Raises `OptionError`."""
    values: dict[str, Any] = {}
    where = "train"
    if options.recipe is not None:
        values, where = read_recipe(options.recipe), str(options.recipe)
    given = {item.name: getattr(options, item.name) for item in dataclasses.fields(options)}
    for name, value in given.items():
        if name not in _NOT_SETTINGS and value is not None:
            values[name] = value
    if options.set:
        changes = dict(values.get("configure") or {})
        for item in options.set:
            key, equals, value = item.partition("=")
            if not equals or not key:
                raise OptionError(f"--set {item}: write KEY=VALUE")
            changes[key] = value
        values["configure"] = changes
    return settings_from(values, where)


def read_recipe(path: Path) -> dict[str, Any]:
    """The options a recipe names. Raises `OptionError`."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        found, doubled = yaml.safe_load(text), _doubled(yaml.compose(text, yaml.SafeLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"recipe {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise OptionError(f"recipe {path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, Mapping):
        raise OptionError(f"recipe {path}: options and their values are needed, as in `method: eagle3`")
    if doubled is not None:
        raise OptionError(f"recipe {path}: {doubled} stands there twice")
    named: dict[str, Any] = {}
    for key, value in found.items():
        # Written `draft-vocab` on the command line and often in recipes too; `configure` is what `train` itself writes.
        name = "configure" if key == "set" else str(key).replace("-", "_")
        if name in named:
            raise OptionError(f"recipe {path}: {key} stands there twice, under two names of one option")
        named[name] = value
    return named


def _doubled(node: Any) -> str | None:
    """A key that stands twice in one mapping, of which YAML would take the last."""
    import yaml

    seen = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        if key.value in seen:
            return str(key.value)
        seen.add(key.value)
        inside = _doubled(value)
        if inside is not None:
            return inside
    return None


def load_target(settings: TrainingSettings) -> tuple[LoadedModel, TargetInfo]:
    """The target, and what a drafter may know of it."""
    import torch

    load = _loader(settings)
    model = load(settings.model)  # refuses a number of threads that the system would choke on
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return model, target_info(model, load)


def target_info(model: LoadedModel, load: Callable[[str], LoadedModel]) -> TargetInfo:
    """What a drafter that is trained or tried alone may know of its target."""
    from draftsmith.drafters.base import TargetInfo

    def refuse(selection: str) -> Any:
        raise UnsupportedError(f"drafter {selection} is made of other drafters and cannot be trained")

    return TargetInfo(
        vocab_size=model.backend.spec.vocab_size,
        max_context=model.backend.spec.max_context,
        eos_ids=model.eos_ids,
        tokenizer=model.tokenizer,
        load_model=load,
        make_drafter=refuse,
        backend=model.backend,
        name=model.name,
    )


def _loader(settings: TrainingSettings) -> Callable[[str], LoadedModel]:
    """How models are loaded for a run."""
    from draftsmith.engine.loading import load_model

    return lambda name: load_model(name, backend=settings.backend, threads=settings.threads)


def _print_plan(job: Job, *, as_json: bool) -> int:
    from draftsmith.training.plan import make_plan

    note("timing a few steps of this run")
    plan = make_plan(job)
    if as_json:
        print(json.dumps(plan.as_json()))
    else:
        lines = plan.lines()
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"{name:{width}}  {text}")
    return 0


def _conclude(figures: Mapping[str, Any], job: Job, trainer: Trainer, model: LoadedModel, *, as_json: bool) -> None:
    settings = job.settings
    live: dict[str, float] = {}
    if settings.live_texts:
        from draftsmith.cli.live_check import live_check

        try:
            live = live_check(job, trainer, model, _loader(settings))
            note(
                f"live: {live['engine']:.3f} tokens per step through the engine, {live['replayed']:.3f} replayed on "
                f"the same answers ({100 * live['difference']:+.1f} %)"
            )
        except DraftsmithError as error:  # the drafter is written, and what is known of it is told all the same
            note(f"no live check: {error}")
    if as_json:
        print(json.dumps({"output": str(settings.output), "steps": trainer.progress.step, **figures, "live": live}))
        return
    print(f"{settings.output}: {settings.method} for {settings.model}, {trainer.progress.step} steps")
    if figures:
        print(
            f"{figures['greedy_tokens_per_step']:.2f} tokens per step at temperature 0, "
            f"{figures['sampled_tokens_per_step']:.2f} at 1 (validation, step {figures['step']})"
        )
