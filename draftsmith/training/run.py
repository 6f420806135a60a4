"""From settings and a target to a trained drafter on disk: what `draftsmith train` does, without the command line.

`prepare` checks and puts together everything a run needs, `carry_out` runs or continues it, `finish` writes the
drafter. Invariants: whatever is wrong with data, settings or places is found in `prepare`, before anything is
written; the drafter's directory appears whole, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import (
    TARGET,
    drafter_class,
    load_module,
    module_class,
    save_module,
)
from draftsmith.drafters.rank_accuracy import KEY, rank_accuracies
from draftsmith.drafters.trainable import DraftModule, frequent_ids
from draftsmith.errors import DataError, DraftsmithError, OptionError
from draftsmith.training.batches import BatchOrder, batches_by_length
from draftsmith.training.card import model_card
from draftsmith.training.corpus import Corpus
from draftsmith.training.feature_cache import CachedFeatures, corpus_digest
from draftsmith.training.features import FeatureSource, OnlineFeatures, RememberedFeatures, TargetScorer
from draftsmith.training.logs import TrainingLog
from draftsmith.training.on_policy import OnPolicyFeatures, check_writer
from draftsmith.training.places import alone_in
from draftsmith.training.processes import Processes, ProcessGone
from draftsmith.training.settings import TrainingSettings
from draftsmith.training.state import BEST, LOG, best_fits, read_state, way_on, weights_of
from draftsmith.training.trainer import Listener, Progress, Trainer, count_steps, loss_options

TRAIN, VALIDATION = "train", "validation"
RECIPE, CARD = "recipe.yaml", "README.md"
_NUM_RANKS = 10
"""Candidates of a head that a static tree may take; Medusa's own trees go as far."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """All parts of a run. `weights`: what tells the target's laws from others; `kept`: the texts trained on; `online`:
    their features, scored when asked for; `validation`: the corpus, a source of it and the batches to judge.
    """

    settings: TrainingSettings
    target: TargetInfo
    weights: Mapping[str, Any]
    module: DraftModule
    corpus: Corpus
    kept: Sequence[int]
    order: BatchOrder
    online: FeatureSource
    validation_corpus: Corpus | None
    validation: tuple[FeatureSource, Sequence[Sequence[int]]] | None
    notes: Sequence[str]
    scorer: TargetScorer

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return count_steps(self.settings, self.order)


_ELSEWHERE = ("threads", "processor")
"""Of a model's identity, what may change while its laws stay."""


def prepare(
    settings: TrainingSettings, target: TargetInfo, together: Processes, identity: Mapping[str, Any] | None = None
) -> Job:
    """Open the data, build the module, plan the batches. Raises `UserError`s.

    `identity`: of the loaded target; without one its name stands for its weights.
    """
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
    validation_corpus, validation, more = _validation(settings, target, scorer)
    weights = {key: value for key, value in (identity or {}).items() if key not in _ELSEWHERE}
    return Job(
        settings=settings,
        target=target,
        weights=weights or {"name": settings.model, "backend": settings.backend},
        module=module,
        corpus=corpus,
        kept=kept,
        order=BatchOrder(lengths, kept, settings.batch_tokens, settings.seed),
        online=OnlineFeatures(corpus, scorer),
        validation_corpus=validation_corpus,
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


def carry_out(
    job: Job, listener: Listener, together: Processes, *, tell: Callable[[str], None], restart: bool = False
) -> Trainer | None:
    """Run, or go on where an earlier run of the same settings stopped; `Trainer.finished` says whether it ended.

    None when it was stopped before the first step, while features were kept. `tell`: gets a line about what happens
    outside of steps. `restart`: forget what an earlier run left. Raises `DraftsmithError`.
    """
    settings = job.settings
    try:
        with alone_in(settings, restart=restart) if together.is_first else nullcontext():
            together.meet()  # nobody reads a state that is deleted
            return _carry_out(job, listener, together, tell)
    except ProcessGone as error:
        raise ProcessGone(f"{error}; {way_on(settings.state_dir)}") from error


def with_own_answers(job: Job, source: FeatureSource, together: Processes) -> FeatureSource:
    """The source, and over it the answers that the drafter writes itself where they are wanted."""
    if not job.settings.on_policy:
        return source
    return OnPolicyFeatures(source, job.settings, job.module, job.order, job.scorer, job.target.eos_ids, together)


def _carry_out(job: Job, listener: Listener, together: Processes, tell: Callable[[str], None]) -> Trainer | None:
    settings = job.settings
    source = job.online if settings.cache is None else _cached(job, listener, together, tell)
    if source is None:
        return None
    source = with_own_answers(job, source, together)
    identity = {
        **settings.identity,
        "target": job.weights,
        "data": corpus_digest(job.corpus),
        "validation": None if job.validation_corpus is None else corpus_digest(job.validation_corpus),
    }
    trainer = Trainer(settings, job.module, source, job.order, job.validation, together, identity)
    if trainer.resume(tell):
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
    if trainer.progress.best_step >= 0:
        if not best_fits(settings.state_dir, module):
            raise DraftsmithError(f"{best} is gone or damaged; the same command goes on with the last weights")
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


def _cached(job: Job, listener: Listener, together: Processes, tell: Callable[[str], None]) -> FeatureSource | None:
    """Features on disk, scored where they are missing; None when stopped meanwhile."""
    settings = job.settings
    assert settings.cache is not None
    key = {"target": job.weights, "max_len": settings.max_len}
    if not together.is_first:
        together.meet()  # the first one makes the directory
    cached = CachedFeatures(settings.cache, job.corpus, job.kept, job.scorer, key)
    if together.is_first:
        together.meet()
    told = tell if together.is_first else lambda line: None
    stopped = not cached.fill(lambda done, whole: told(f"scored {done} of {whole} shards"), listener.stop, together.own)
    return None if together.any_of(stopped) else cached


def _validation(
    settings: TrainingSettings, target: TargetInfo, scorer: TargetScorer
) -> tuple[Corpus | None, tuple[FeatureSource, Sequence[Sequence[int]]] | None, list[str]]:
    path = settings.data / VALIDATION
    if not path.exists():
        more = "; --live-texts takes prompts that it was trained on" if settings.live_texts else ""
        return None, None, [f"there is no {path}, so nothing is validated and the last weights are kept{more}"]
    corpus = open_corpus(path, settings, target)
    usable = usable_texts(corpus, min(settings.max_len, target.max_context))
    if not usable:
        raise DataError(f"{path}: no text of at most {settings.max_len} tokens with an answer; nothing to validate on")
    step = max(1, len(usable) // settings.validation_texts)
    chosen = usable[::step][: settings.validation_texts]
    batches = batches_by_length(corpus.lengths.tolist(), chosen, settings.batch_tokens)
    return corpus, (RememberedFeatures(OnlineFeatures(corpus, scorer)), batches), []


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
