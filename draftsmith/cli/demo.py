"""`draftsmith demo`: plain and speculative decoding write the same answers, one fast, one slow.

Called by `app` and by `make demo`. Both arms run on the same weights, alternating, and are counted by the
same code as a benchmark. Invariants: only waiting for tokens is timed, drawing is not; token ids are
compared and every difference is shown; without an explanation (a near tie) the exit code is 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from draftsmith.bench.demo_prompts import DEMO_PROMPTS, DemoPrompt
from draftsmith.bench.differences import NEAR_TIE, explain, find_differences
from draftsmith.bench.environment import MachineLoad, hardware, versions
from draftsmith.bench.own_arm import OwnArm
from draftsmith.bench.runner import Workload, warm_up
from draftsmith.bench.runs import BASELINE, ArmRun, Difference, Key, Measured, RequestRun
from draftsmith.bench.summary import summarise_run
from draftsmith.cli.demo_view import DemoView, choose_view
from draftsmith.cli.loading import load_arms
from draftsmith.cli.options import DemoOptions
from draftsmith.cli.telling import Answer
from draftsmith.errors import OptionError

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine

SETTINGS: Mapping[str, Any] = MappingProxyType({"temperature": 0.0, "seed": 0})
# After one prompt of each kind none begins later than this, so that the demo stays short on a slow machine.
LAST_START_SECONDS = 65.0


def run(options: DemoOptions) -> int:
    """Run the command; returns the exit code."""
    began = time.monotonic()
    if options.drafter == BASELINE:
        raise OptionError(f"the demo compares a drafter with {BASELINE}; name another one")
    loaded = load_arms(options, [BASELINE, options.drafter])
    drafter = loaded[options.drafter].drafter_name
    arms = {BASELINE: loaded[BASELINE], drafter: loaded[options.drafter]}
    view = choose_view(sys.stdout, json=options.json, drafter=drafter, tokenizer=arms[BASELINE].tokenizer)
    view.say(f"{options.model}: plain decoding against the drafter {drafter}, greedy, same weights and prompts.")
    for name, engine in arms.items():
        arm = OwnArm(name, engine, max_concurrency=1)
        warm_up(arm, Workload(prompts=()), arm.encode)
    runs: list[ArmRun] = []
    load = MachineLoad()
    num_kinds = len({item.kind for item in DEMO_PROMPTS})
    for index, item in enumerate(DEMO_PROMPTS):
        if index >= num_kinds and time.monotonic() - began > LAST_START_SECONDS:
            view.say(f"This machine is slow or busy: {index} of {len(DEMO_PROMPTS)} prompts shown, the rest left out.")
            break
        runs.extend(_compare(arms, index, item, view))
    measured = Measured(
        config=_config(options, arms),
        runs=tuple(runs),
        differences=_differences(runs, arms[BASELINE]),
        failed={},
        other_cores=load.others(),
    )
    summary = summarise_run(measured)
    if options.json:
        print(json.dumps({**summary, "outputs": _outputs(measured)}, ensure_ascii=False))
    view.finish(summary, measured)
    return 1 if any(not _near_tie(difference) for difference in measured.differences.values()) else 0


def _compare(arms: Mapping[str, Engine], index: int, item: DemoPrompt, view: DemoView) -> list[ArmRun]:
    """Both arms on one prompt; who goes first alternates, so that neither profits from a warm cache."""
    view.begin(item, index + 1, len(DEMO_PROMPTS))
    order = list(arms) if index % 2 == 0 else list(arms)[::-1]
    runs = {}
    for place, drafter in enumerate(order):
        engine, answer = arms[drafter], Answer()
        stream = engine.stream(item.messages, max_new_tokens=item.max_new_tokens, **SETTINGS)
        for event in answer.timed(stream):
            view.token(drafter, event, answer)
        answer.close(engine.take_events())
        runs[drafter] = _as_run(answer, engine, item, drafter=drafter, index=index, place=place)
    view.end(item, runs)
    return [runs[drafter] for drafter in arms]


def _as_run(answer: Answer, engine: Engine, item: DemoPrompt, *, drafter: str, index: int, place: int) -> ArmRun:
    request = RequestRun(
        prompt=index,
        turn=0,
        prompt_id=item.title,
        category=item.kind,
        due=0.0,
        sent=0.0,
        ended=answer.seconds,
        request=answer.request,
        prompt_tokens=len(engine.encode(item.messages)),
        num_tokens=len(answer.token_ids),
        token_ids=tuple(answer.token_ids),
        text=answer.text,
        finish_reason=answer.finish_reason,
        arrivals=tuple(answer.arrivals),
    )
    return ArmRun(
        repeat=0,
        block=index,
        arm=drafter,
        order=place,
        seconds=answer.seconds,
        requests=(request,),
        events=answer.events,
    )


def _config(options: DemoOptions, arms: Mapping[str, Engine]) -> dict[str, Any]:
    return {
        "model": options.model,
        "baseline": BASELINE,
        "arms": list(arms),
        "descriptions": {
            name: {"engine": "draftsmith", "backend": engine.backend_name} for name, engine in arms.items()
        },
        "targets": {},
        "load": "closed:1",
        "temperature": 0.0,
        "num_prompts": len(DEMO_PROMPTS),
        "hardware": hardware(options.threads),
        "versions": versions(),
    }


def _differences(runs: Sequence[ArmRun], engine: Engine) -> dict[Key, Difference]:
    ids = {(run.arm, request.prompt): request.token_ids or () for run in runs for request in run.requests}
    return {
        key: explain(
            engine, DEMO_PROMPTS[key.prompt].messages, ids[BASELINE, key.prompt], ids[key.arm, key.prompt], SETTINGS
        )
        for key in find_differences(runs, BASELINE)
    }


def _near_tie(difference: Difference) -> bool:
    return difference.gap is not None and difference.gap < NEAR_TIE


def _outputs(measured: Measured) -> list[dict[str, Any]]:
    return [
        {
            "arm": run.arm,
            "prompt": request.prompt_id,
            "kind": request.category,
            "token_ids": request.token_ids,
            "text": request.text,
            "finish_reason": request.finish_reason,
            "seconds": run.seconds,
        }
        for run in measured.runs
        for request in run.requests
    ]
