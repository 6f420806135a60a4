"""From settings and a target to a trained drafter on disk: what `draftsmith train` does, without the command line.

`prepare` checks and puts together everything a run needs, `carry_out` runs or continues it, `finish` writes the
drafter. Invariants: whatever is wrong with data, settings or places is found in `prepare`, before anything is
written; the drafter's directory appears whole, at the end.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import (
    TARGET,
    drafter_class,
    is_drafter,
    load_module,
    module_class,
    save_module,
)
from draftsmith.drafters.rank_accuracy import KEY, rank_accuracies
from draftsmith.drafters.trainable import DraftModule, frequent_ids
from draftsmith.errors import DataError, DraftsmithError, OptionError
from draftsmith.io.staging import check_drafter_output
from draftsmith.training.batches import BatchOrder, batches_by_length
from draftsmith.training.card import model_card
from draftsmith.training.corpus import Corpus
from draftsmith.training.feature_cache import CachedFeatures, corpus_digest
from draftsmith.training.features import FeatureSource, OnlineFeatures, RememberedFeatures, TargetScorer
from draftsmith.training.logs import TrainingLog
from draftsmith.training.on_policy import OnPolicyFeatures, check_writer
from draftsmith.training.processes import Processes
from draftsmith.training.settings import TrainingSettings
from draftsmith.training.state import BEST, LAST, LOG, read_state, weights_of
from draftsmith.training.trainer import Listener, Progress, Trainer, count_steps, loss_options

TRAIN, VALIDATION = "train", "validation"
RECIPE, CARD = "recipe.yaml", "README.md"
_NUM_RANKS = 10
"""Candidates of a head that a static tree may take; Medusa's own trees go as far."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All parts of a run. `kept`: the texts trained on; `online`: their features, scored when asked for."""

    settings: TrainingSettings
    target: TargetInfo
    module: DraftModule
    corpus: Corpus
    kept: Sequence[int]
    order: BatchOrder
    online: FeatureSource
    validation: tuple[FeatureSource, Sequence[Sequence[int]]] | None
    notes: Sequence[str]
    scorer: TargetScorer

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return count_steps(self.settings, self.order)


def prepare(settings: TrainingSettings, target: TargetInfo, together: Processes) -> Job:
    """Open the data, build the module, plan the batches. Raises `UserError`s."""
    if settings.accumulate % together.count:
        raise OptionError(
            f"accumulate is {settings.accumulate}; {together.count} processes need a multiple of {together.count}"
        )
    # `data prepare` makes both in one directory; a corpus of other origin may hold its validation inside.
    has_both = (settings.data / TRAIN).is_dir()
    corpus = open_corpus(settings.data / TRAIN if has_both else settings.data, settings, target)
    module = build_module(settings, target, corpus)
    kept = usable_texts(corpus, min(settings.max_len, target.max_context))
    notes = _notes(corpus, kept, settings)
    if not kept:
        raise DataError(f"{settings.data}: {notes[0] if notes else 'there are no texts'}; nothing is left to train on")
    scorer = TargetScorer(target.backend, module.needs, settings.feature_rows)
    lengths = corpus.lengths.tolist()
    validation, more = _validation(settings, target, scorer)
    return Job(
        settings=settings,
        target=target,
        module=module,
        corpus=corpus,
        kept=kept,
        order=BatchOrder(lengths, kept, settings.batch_tokens, settings.seed),
        online=OnlineFeatures(corpus, scorer),
        validation=validation,
        notes=[*notes, *more],
        scorer=scorer,
    )


def open_corpus(path: Path, settings: TrainingSettings, target: TargetInfo) -> Corpus:
    """A corpus in the target's own token ids. Raises `DataError`."""
    corpus = Corpus.open(path)
    corpus.check_target(settings.model, target.vocab_size, target.tokenizer)
    return corpus


def build_module(settings: TrainingSettings, target: TargetInfo, corpus: Corpus) -> DraftModule:
    """The method's module with its first weights."""
    if settings.init is not None:
        module = load_module(settings.init, settings.method, target)
        if module.tunes_target:
            raise OptionError(
                f"{settings.init} holds heads of a target that is tuned already; go on with that target: "
                f"--model {settings.init / TARGET}, without --init"
            )
        loss_options(settings, module)
        check_writer(settings, module)
        return module
    kind = module_class(settings.method)
    config = kind.configure(target, settings.configure)
    ids = None
    if settings.draft_vocab is not None:
        ids = frequent_ids(corpus.counts, settings.draft_vocab, always=sorted(target.eos_ids))
    module = kind(config, target, ids)
    module.initialise(target, torch.Generator().manual_seed(settings.seed))
    loss_options(settings, module)
    check_writer(settings, module)
    return module


def usable_texts(corpus: Corpus, max_len: int) -> list[int]:
    """Texts that are not too long and have something to draft."""
    lengths = corpus.lengths.tolist()
    return [index for index in range(len(corpus)) if lengths[index] <= max_len and bool(corpus.answer(index)[2:].any())]


def carry_out(job: Job, listener: Listener, together: Processes, *, tell: Callable[[str], None]) -> Trainer:
    """Run, or go on where an earlier run of the same settings stopped; `Trainer.finished` says whether it ended.

    `tell`: gets a line about what happens outside of steps. Raises `DraftsmithError`.
    """
    settings = job.settings
    prepare_places(settings)
    with alone_in(settings.state_dir) if together.is_first else nullcontext():
        return _carry_out(job, listener, together, tell)


def with_own_answers(job: Job, source: FeatureSource, together: Processes) -> FeatureSource:
    """The source, and over it the answers that the drafter writes itself where they are wanted."""
    if not job.settings.on_policy:
        return source
    return OnPolicyFeatures(source, job.settings, job.module, job.order, job.scorer, job.target.eos_ids, together)


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Inside, no other run works in that directory. Raises `OptionError` when one does."""
    with (directory / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(f"another run is at work in {directory}; give another --output") from error
        yield


def _carry_out(job: Job, listener: Listener, together: Processes, tell: Callable[[str], None]) -> Trainer:
    settings = job.settings
    source = job.online if settings.cache is None else _cached(job, listener, together, tell)
    source = with_own_answers(job, source, together)
    identity = {**settings.identity, "data": corpus_digest(job.corpus)}
    trainer = Trainer(settings, job.module, source, job.order, job.validation, together, identity)
    if trainer.resume():
        tell(f"going on from step {trainer.progress.step}")
    if not together.is_first:
        trainer.run(Listener(stop=listener.stop))
        return trainer
    log = TrainingLog(settings.state_dir / LOG, trainer.progress.step)
    try:
        log.write("start", step=trainer.progress.step, settings=settings.as_plain(), torch=torch.__version__)
        trainer.run(_logged(listener, log))
    finally:
        log.close()
    return trainer


def _logged(listener: Listener, log: TrainingLog) -> Listener:
    def on_step(report: Any, progress: Progress, num_steps: int) -> None:
        log.step(report)
        listener.on_step(report, progress, num_steps)

    def on_validation(figures: Any, progress: Progress) -> None:
        log.validation(figures, progress)
        listener.on_validation(figures, progress)

    return Listener(on_step=on_step, on_validation=on_validation, on_save=listener.on_save, stop=listener.stop)


def finish(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Write the drafter with the best weights, its card, recipe and log; returns the figures of these weights."""
    settings, module = job.settings, job.module
    figures: dict[str, Any] = {}
    best = settings.state_dir / BEST
    if trainer.progress.best_step >= 0 and best.exists():
        tensors, figures = read_state(best)
        module.load_state_dict(weights_of(tensors))
    facts = _facts(job, trainer)
    ranks = _ranks(job, trainer)
    try:
        save_module(
            settings.output,
            settings.method,
            module,
            facts["verified_by"],
            job.target,
            {**facts, **ranks, "validation": figures},
            texts={
                CARD: model_card(settings, facts, figures),
                RECIPE: recipe_text(settings),
                LOG: (settings.state_dir / LOG).read_text(encoding="utf-8"),
            },
            dtype=getattr(torch, settings.dtype),
        )
    except OSError as error:
        problem = error.strerror or error
        raise DraftsmithError(
            f"{settings.output}: cannot be written ({problem}); the trained state is in {settings.state_dir}"
        ) from error
    return figures


def _ranks(job: Job, trainer: Trainer) -> dict[str, Any]:
    """What static trees are built from, measured on the validation texts, or on training texts where there are none."""
    module = job.module
    if not module.needs_ranks:
        return {}
    source, batches = job.validation or (job.online, [[index] for index in job.kept[: job.settings.validation_texts]])
    module.eval()
    seen = (module.as_verified(source.batch(batch)) for batch in batches)
    return {KEY: rank_accuracies(module, seen, trainer.options.num_depths, _NUM_RANKS)}


def recipe_text(settings: TrainingSettings) -> str:
    """The settings as a recipe that `draftsmith train` takes."""
    plain = {key: value for key, value in settings.as_plain().items() if value is not None}
    return yaml.safe_dump(plain, sort_keys=False)


def prepare_places(settings: TrainingSettings, *, restart: bool = False) -> None:
    """Make the state's directory. Raises `OptionError` when output or state cannot be written."""
    state = settings.state_dir
    try:
        if restart and state.exists():
            shutil.rmtree(state)
        state.mkdir(parents=True, exist_ok=True)
        probe = state / f".probe-{os.getpid()}"  # each process of a run looks for itself
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"output {settings.output}: cannot be written there: {error.strerror or error}") from error


def check_output(settings: TrainingSettings, *, force: bool) -> None:
    """Raise `OptionError` for an output that would overwrite something not of this run."""
    output = settings.output
    check_drafter_output(output, is_drafter=is_drafter)
    if output.exists() and not force and not (settings.state_dir / LAST).exists():
        raise OptionError(f"output {output} exists; give another, or --force to replace it")


def _cached(job: Job, listener: Listener, together: Processes, tell: Callable[[str], None]) -> FeatureSource:
    settings, spec = job.settings, job.target.backend.spec
    assert settings.cache is not None
    key = {
        "target": {"name": settings.model, "backend": settings.backend, "layers": spec.num_layers, "width": spec.width},
        "max_len": settings.max_len,
    }
    if not together.is_first:
        together.meet()  # the first one makes the directory
    cached = CachedFeatures(settings.cache, job.corpus, job.kept, job.scorer, key)
    if together.is_first:
        together.meet()
    told = tell if together.is_first else lambda line: None
    stopped = not cached.fill(lambda done, whole: told(f"scored {done} of {whole} shards"), listener.stop, together.own)
    if together.any_of(stopped):
        raise DraftsmithError(f"stopped while {settings.cache} was filled; the same command goes on from there")
    return cached


def _validation(
    settings: TrainingSettings, target: TargetInfo, scorer: TargetScorer
) -> tuple[tuple[FeatureSource, Sequence[Sequence[int]]] | None, list[str]]:
    path = settings.data / VALIDATION
    if not path.exists():
        return None, [f"there is no {path}, so nothing is validated and the last weights are kept"]
    corpus = open_corpus(path, settings, target)
    usable = usable_texts(corpus, min(settings.max_len, target.max_context))
    if not usable:
        raise DataError(f"{path}: no text of at most {settings.max_len} tokens with an answer; nothing to validate on")
    step = max(1, len(usable) // settings.validation_texts)
    chosen = usable[::step][: settings.validation_texts]
    batches = batches_by_length(corpus.lengths.tolist(), chosen, settings.batch_tokens)
    return (RememberedFeatures(OnlineFeatures(corpus, scorer)), batches), []


def _notes(corpus: Corpus, kept: Sequence[int], settings: TrainingSettings) -> list[str]:
    left_out = len(corpus) - len(kept)
    if not left_out:
        return []
    longer = int((corpus.lengths > settings.max_len).sum())
    return [
        f"{left_out:,} of {len(corpus):,} texts are left out: {longer:,} are longer than {settings.max_len} tokens "
        f"(--max-len), {left_out - longer:,} have no answer to draft"
    ]


def _facts(job: Job, trainer: Trainer) -> dict[str, Any]:
    progress, options, settings = trainer.progress, trainer.options, job.settings
    return {
        "drafter": drafter_class(settings.method).selection(settings.method, settings.output),
        "verified_by": str(settings.output / TARGET) if job.module.tunes_target else settings.model,
        "tuned": job.module.tunes_target,
        "parameters": sum(parameter.numel() for parameter in job.module.parameters()),
        "draft_vocab": len(job.module.draft_ids),
        "vocab_size": job.target.vocab_size,
        "tokenizer": job.corpus.target.tokenizer,
        "texts": len(job.kept),
        "text_tokens": sum(int(job.corpus.lengths[index]) for index in job.kept),
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "loss": options.loss,
        "depths": options.num_depths,
        "decay": options.decay,
        "validation_texts": 0 if job.validation is None else sum(map(len, job.validation[1])),
    }
