"""From what was measured to the figures of `summary.json`.

Called by the command line, and by anybody who reads a bundle back. Every count comes from the event log
through `core.stats`. Invariants: totals over totals, never means of rates; an arm is compared with the
baseline on the blocks that both finished; a failed prompt is counted and enters no other figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.bench.differences import NEAR_TIE
from draftsmith.bench.runs import BASELINE, ArmRun, Measured
from draftsmith.core.stats import EventLog, ratio_interval, summarise

BUSY_CORES = 0.25
"""From so many cores busy with other programs on, measured speeds say little."""

DEFINITIONS = {
    "emitted_tokens": "tokens written, the one each prompt step emits included",
    "steps": "(request, step) pairs after the prompt: a batched forward is one for each request in it",
    "tokens_per_step": "(emitted_tokens - prompt_step_tokens) / steps, pooled over the run, bonus token included",
    "tokens_per_second": "emitted_tokens / seconds_total, prompt processing included",
    "speedup": "tokens_per_second over that of the arm none on the same prompts; 95 % paired bootstrap over blocks",
    "identical_prompts": "prompts whose token ids equal those of the arm none",
    "other_cores": "cores that other programs kept busy meanwhile: above 0.25 or so, speeds say little",
    "seconds": "draft, verify (the target's forward), sample (verification rule), other (the rest of the wall time)",
}


def summarise_run(measured: Measured) -> dict[str, Any]:
    """The document written as `summary.json`."""
    config = measured.config
    complete = _complete_blocks(measured)
    runs = [run for run in measured.runs if run.block in complete]
    categories = dict.fromkeys(output.category for run in runs for output in run.outputs)
    results = []
    for drafter in config["drafters"]:
        result = {
            "drafter": drafter,
            "concurrency": config["concurrency"],
            "temperature": config["temperature"],
            **_figures(measured, runs, drafter),
        }
        result["failed_prompts"] = len(measured.failed) + sum(
            len(run.prompts) for run in runs if run.drafter == drafter and run.error is not None
        )
        if any(categories):
            result["categories"] = {
                category: _figures(measured, [run for run in runs if _category(run) == category], drafter)
                for category in categories
            }
        results.append(result)
    return {
        "model": config["model"],
        "backend": config["backend"],
        "hardware": config["hardware"],
        "versions": config["versions"],
        "interrupted": measured.interrupted,
        "other_cores": _rounded(measured.other_cores),
        "prompts_measured": sum(len(run.prompts) for run in runs if run.drafter == BASELINE),
        "prompts_given": config["num_prompts"],
        "definitions": DEFINITIONS,
        "results": results,
    }


def _complete_blocks(measured: Measured) -> set[int]:
    """Blocks that every arm has worked on; an interrupted run leaves out the one it was stopped in."""
    arms = set(measured.config["drafters"])
    seen: dict[int, set[str]] = {}
    for run in measured.runs:
        seen.setdefault(run.block, set()).add(run.drafter)
    return {block for block, drafters in seen.items() if drafters == arms}


def _figures(measured: Measured, runs: Sequence[ArmRun], drafter: str) -> dict[str, Any]:
    own = {run.block: run for run in runs if run.drafter == drafter and run.error is None}
    base = {run.block: run for run in runs if run.drafter == BASELINE and run.error is None}
    log = EventLog()
    for run in own.values():
        log.extend(run.events)
    counts = summarise(log)
    wall = sum(run.seconds for run in own.values())
    emitted = sum(run.emitted for run in own.values())
    shared = [block for block in own if block in base]
    compared = [output.prompt for block in shared for output in own[block].outputs]
    differences = [
        measured.differences[drafter, prompt] for prompt in compared if (drafter, prompt) in measured.differences
    ]
    return {
        "num_prompts": sum(len(run.outputs) for run in own.values()),
        "num_blocks": len(shared),
        "emitted_tokens": emitted,
        "prompt_step_tokens": counts.prompt_emitted,
        "steps": counts.pairs,
        "tokens_per_step": _rounded(counts.tokens_per_step),
        "tokens_per_second": _rounded(emitted / wall if wall else None),
        "drafted_tokens": counts.drafted,
        "accepted_tokens": counts.accepted,
        "speedup": _speedup([own[block] for block in shared], [base[block] for block in shared]),
        "identical_prompts": len(compared) - len(differences),
        "divergent_prompts": len(differences),
        "near_ties": sum(item.gap is not None and item.gap < NEAR_TIE for item in differences),
        "seconds": {
            "draft": _rounded(counts.seconds.draft),
            "verify": _rounded(counts.seconds.verify),
            "sample": _rounded(counts.seconds.sample),
            "other": _rounded(wall - counts.seconds.draft - counts.seconds.verify - counts.seconds.sample),
        },
        "seconds_total": _rounded(wall),
    }


def _speedup(own: Sequence[ArmRun], base: Sequence[ArmRun]) -> dict[str, Any]:
    if not own:
        return {"ratio": None, "ci95": [None, None]}
    interval = ratio_interval([(run.emitted, run.seconds) for run in own], [(run.emitted, run.seconds) for run in base])
    return {"ratio": _rounded(interval.ratio), "ci95": [_rounded(interval.low), _rounded(interval.high)]}


def _category(run: ArmRun) -> str | None:
    return run.outputs[0].category if run.outputs else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
