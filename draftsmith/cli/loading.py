"""From options to a loaded engine and checked request settings.

Called by every command that runs a model. Invariants: settings are checked before a model is loaded, so
a slip costs no waiting; the command line makes engines here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from draftsmith.cli.options import CoreSamplingOptions, LengthOptions, RuntimeOptions, SamplingOptions
from draftsmith.errors import DataError, PromptError
from draftsmith.io.fingerprint import FILE_FACTS
from draftsmith.registry import CONTROLLERS, known_name

if TYPE_CHECKING:
    from draftsmith.bench.audit_subject import EngineAudited, Target
    from draftsmith.cli.answering import ArmAnswerer
    from draftsmith.engine.engine import Engine
    from draftsmith.engine.loading import LoadedModel
    from draftsmith.training.turns import Turns


class RuntimeChoice(Protocol):
    """The options that decide how a model runs."""

    @property
    def controller(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def threads(self) -> int | None: ...


class EngineChoice(RuntimeChoice, Protocol):
    """The options that decide which engine is loaded."""

    @property
    def model(self) -> str: ...


def load_engine(choice: EngineChoice, *, drafter: str) -> Engine:
    """Load the model for one user; on a terminal a line on stderr says so while it takes.

    Raises `UserError`s for everything that is wrong with the model, the drafter or the choice.
    """
    _note_idle_controller(choice, [drafter])
    with loading_notice(f"loading {choice.model} ..."):
        from draftsmith.engine.engine import Engine

        return Engine.load(
            choice.model,
            drafter=drafter,
            backend=choice.backend,
            dtype=choice.dtype,
            controller=choice.controller,
            threads=choice.threads,
            max_batch=1,
        )


def load_arms(
    choice: EngineChoice, names: Sequence[str], *, concurrency: int = 1, shipped_too: bool = False
) -> dict[str, Engine]:
    """One engine per arm (`split_arm`) over the same weights, for a fair comparison.

    Each has its own drafter, controller and cache, so none learns from another; prefix reuse is off. `shipped_too`:
    also one for every trained drafter that comes with the package for this model, by its method's name.
    Raises `UserError`s as `load_engine` does.
    """
    _note_idle_controller(choice, names)
    with loading_notice(f"loading {choice.model} ..."):
        from draftsmith.drafters.shipped import shipped_drafters
        from draftsmith.engine.engine import Engine, EngineSettings

        load = _loader(choice)
        model = load(choice.model)
        wanted = list(names)
        if shipped_too:
            wanted += [item.method for item in shipped_drafters() if item.suits(model.backend.spec, model.tokenizer)]
        arms = {}
        for name in dict.fromkeys(wanted):
            drafter, controller = split_arm(name, choice.controller)
            settings = EngineSettings(drafter=drafter, controller=controller, max_batch=concurrency, prefix_cache=False)
            arms[name] = Engine(model, settings, load=load)
        return arms


def split_arm(name: str, controller: str) -> tuple[str, str]:
    """Drafter and controller of an arm: `DRAFTER@CONTROLLER`, or a drafter that takes the controller given."""
    drafter, mark, own = name.rpartition("@")
    is_own = mark and known_name(own.partition(":")[0], CONTROLLERS) is not None
    return (drafter, own) if is_own else (name, controller)


def load_audited(
    choice: EngineChoice, drafter: str, *, at_once: int
) -> tuple[EngineAudited, EngineAudited, Target, bool]:
    """The audited engine, as users run it; the plain one; the target itself; and whether it has a chat template.

    All over the same weights. Raises `UserError`s as `load_engine` does.
    """
    with loading_notice(f"loading {choice.model} ..."):
        from draftsmith.bench.audit_subject import EngineAudited, Target, plain_of
        from draftsmith.engine.engine import Engine, EngineSettings

        load = _loader(choice)
        model = load(choice.model)
        settings = EngineSettings(drafter=drafter, controller=choice.controller, max_batch=at_once)
        audited = EngineAudited(Engine(model, settings, load=load), drafter)
        plain = Engine(model, EngineSettings(drafter="none", max_batch=at_once, prefix_cache=False))
        return audited, plain_of(plain), Target(model), model.chat is not None


def load_for_texts(
    choice: RuntimeChoice, model: str, *, drafter: str, batch: int
) -> tuple[ArmAnswerer, Turns, dict[str, Any]]:
    """An engine that writes `batch` training texts at once; how its target reads conversations; what its files are.

    Raises `UserError`s as `load_engine` does, and `DataError` for a model without a chat template.
    """
    _note_idle_controller(choice, [drafter])
    with loading_notice(f"loading {model} ..."):
        from draftsmith.bench.own_arm import OwnArm
        from draftsmith.cli.answering import ArmAnswerer
        from draftsmith.engine.engine import Engine, EngineSettings
        from draftsmith.training.turns import Turns

        load = _loader(choice)
        loaded = load(model)
        if loaded.chat is None:
            raise DataError(f"{model} has no chat template, so it cannot write conversations")
        turns = Turns(loaded.chat, loaded.tokenizer, loaded.eos_ids)
        settings = EngineSettings(
            drafter=drafter,
            controller=choice.controller,
            max_batch=batch,
            chunk_rows=max(512, 4 * batch),
            prefix_cache=True,
        )
        arm = OwnArm("texts", Engine(loaded, settings, load=load), max_concurrency=batch)
        files = {f"model_{key}": loaded.identity[key] for key in FILE_FACTS if key in loaded.identity}
        return ArmAnswerer(arm, is_remote=False), turns, files


def _note_idle_controller(choice: RuntimeChoice, drafters: Sequence[str]) -> None:
    """A controller that was asked for, where no drafter is, does nothing, and its user should know."""
    if choice.controller != RuntimeOptions().controller and all(drafter == "none" for drafter in drafters):
        from draftsmith.cli.console import note

        note("nothing drafts: --controller has nothing to decide")


def _loader(choice: RuntimeChoice) -> Callable[[str], LoadedModel]:
    """How a target or a drafter's model is loaded under these options."""
    from draftsmith.engine.loading import load_model

    return lambda name: load_model(name, backend=choice.backend, dtype=choice.dtype, threads=choice.threads)


def request_settings(*groups: Any, **more: Any) -> dict[str, Any]:
    """Keyword arguments of `Engine.generate` from groups of options, checked.

    `groups`: option objects; of each, the sampling and length fields count. Raises `OptionError`.
    """
    from draftsmith.engine.params import GenerationParams

    settings: dict[str, Any] = {}
    for group in groups:
        for options_class in (CoreSamplingOptions, SamplingOptions, LengthOptions):
            if isinstance(group, options_class):
                names = [item.name for item in dataclasses.fields(options_class)]
                settings.update({name: getattr(group, name) for name in names})
    settings.update(more)
    GenerationParams.create(**settings)
    return settings


def checked_text(text: str, where: str) -> str:
    """The text itself. Raises `PromptError` when it came from bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{where} is not UTF-8 text") from error
    return text


@contextmanager
def loading_notice(text: str) -> Iterator[None]:
    """On a terminal, a line on stderr while something is loaded."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"\x1b[2m{text}\x1b[0m")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
