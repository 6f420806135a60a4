"""Whether the engine gains from a trained drafter what its validation says.

Called by `cli.train` after training. The engine answers prompts greedily with the drafter on disk; the answers it
wrote are then judged and replayed as a validation is. Both count tokens per step on the same texts, so they
differ only where training and inference compute something different.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from draftsmith.core.stats import summarise
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel
from draftsmith.errors import DraftsmithError

if TYPE_CHECKING:
    from draftsmith.training.run import Job
    from draftsmith.training.trainer import Trainer

MAX_NEW_TOKENS = 128


def live_check(job: Job, trainer: Trainer, model: LoadedModel, load: Callable[[str], LoadedModel]) -> dict[str, float]:
    """Tokens per step through the engine and replayed, and their relative difference.

    `model`: the target; a method that changes it is checked with the changed one. `load`: loads a model as it was.
    Raises `DraftsmithError` when no prompt gave an answer of some length.
    """
    import torch

    from draftsmith.drafters.checkpoint import TARGET, drafter_class, load_module
    from draftsmith.training.features import MaskedText, TargetScorer, collate
    from draftsmith.training.validation import answer_spans, judge_batch, replay_batch

    settings, depths = job.settings, trainer.options.num_depths
    source, batches = job.validation if job.validation is not None else (job.online, [job.kept])
    texts = [source.text(index) for batch in batches for index in batch]
    prompts = []
    for text in texts[:: max(1, len(texts) // settings.live_texts)][: settings.live_texts]:
        start, _ = next(answer_spans(text.answer.tolist()))
        if start:
            prompts.append(text.tokens[:start].tolist())
    target = job.target
    if job.module.tunes_target:
        model = load(str(settings.output / TARGET))
        target = dataclasses.replace(target, backend=model.backend, name=model.name)
    engine = Engine(
        model,
        EngineSettings(
            drafter=drafter_class(settings.method).selection(settings.method, settings.output),
            controller=f"fixed:num_draft={depths}",
            max_batch=1,
            prefix_cache=False,
        ),
        load=load,
    )
    written = []
    for prompt in prompts:
        limit = min(MAX_NEW_TOKENS, model.backend.spec.max_context - len(prompt))
        answer = list(engine.generate(prompt, max_new_tokens=limit).token_ids)
        tokens = torch.tensor(prompt + answer)
        written.append(MaskedText(tokens=tokens, answer=torch.arange(len(tokens)) >= len(prompt)))
    counts = summarise(engine.take_events())
    if not counts.pairs:
        raise DraftsmithError("the live check's prompts gave no answers of two tokens or more")
    module = load_module(settings.output, settings.method, target)
    scorer = TargetScorer(model.backend, module.needs, settings.feature_rows)
    tokens_replayed = steps = 0
    for text in written:
        batch = collate([text], scorer.score([text]))
        found = replay_batch(judge_batch(module, batch, depths), batch)
        tokens_replayed, steps = tokens_replayed + found.tokens, steps + found.steps
    in_engine, replayed = counts.emitted / counts.pairs, tokens_replayed / steps
    return {"engine": in_engine, "replayed": replayed, "difference": in_engine / replayed - 1}
