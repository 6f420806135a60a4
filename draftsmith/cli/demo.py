"""`draftsmith demo`: plain and speculative decoding write the same answers, one fast, one slow.

Called by `app` and by `make demo`. The drafters that come trained for the model follow, on prompts whose answers repeat
nothing. Arms run on the same weights, alternating, and are counted by the same code as a benchmark. Invariants: only
waiting for tokens is timed, drawing is not; token ids are compared and every difference is shown; without an
explanation (a near tie) the exit code is 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from draftsmith.bench.demo_prompts import DEMO_PROMPTS, FREE_KIND, DemoPrompt
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
from draftsmith.core.fidelity import Fidelity
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
    loaded = load_arms(options, [BASELINE, options.drafter], shipped_too=True)
    plain, chosen = loaded.pop(BASELINE), loaded.pop(options.drafter)
    drafter = chosen.drafter_name
    trained = {name: engine for name, engine in loaded.items() if name != drafter}
    view = choose_view(sys.stdout, json=options.json, tokenizer=plain.tokenizer)
    view.say(f"{options.model}: plain decoding against the drafter {drafter}, greedy, same weights and prompts.")
    main = _Part(options, {BASELINE: plain, drafter: chosen}, view)
    parts = [main]
    num_kinds = len({item.kind for item in DEMO_PROMPTS})
    for index, item in enumerate(DEMO_PROMPTS):
        if index >= num_kinds and time.monotonic() - began > LAST_START_SECONDS:
            view.say(f"This machine is slow or busy: {index} of {len(DEMO_PROMPTS)} prompts shown, the rest left out.")
            break
        main.compare(item)
    if trained:
        view.say(f"\nThe drafters that come trained for this model ({', '.join(trained)}), where nothing repeats:")
        parts.append(_Part(options, {BASELINE: plain, **trained}, view))
        for item in DEMO_PROMPTS:
            if item.kind == FREE_KIND:
                parts[-1].compare(item)
    measured = [part.measured() for part in parts]
    summaries = [summarise_run(part) for part in measured]
    if options.json:
        told = {**summaries[0], "outputs": _outputs(measured[0])}
        if trained:
            told["trained"] = {"results": summaries[1]["results"], "outputs": _outputs(measured[1])}
        print(json.dumps(told, ensure_ascii=False))
    view.finish(summaries, measured)
    differences = [difference for part in measured for difference in part.differences.values()]
    return 1 if any(not _near_tie(difference) for difference in differences) else 0


class _Part:
    """Plain decoding and some drafters on some of the prompts."""

    def __init__(self, options: DemoOptions, arms: Mapping[str, Engine], view: DemoView) -> None:
        self._options, self._arms, self._view = options, arms, view
        self._runs: list[ArmRun] = []
        for name, engine in arms.items():
            arm = OwnArm(name, engine, max_concurrency=1)
            warm_up(arm, Workload(prompts=()), arm.encode)
        self._load = MachineLoad()

    def compare(self, item: DemoPrompt) -> None:
        """All arms on one prompt; who goes first changes, so that none profits from a warm cache."""
        index = DEMO_PROMPTS.index(item)
        self._view.begin(item, index + 1, len(DEMO_PROMPTS), list(self._arms))
        order = list(self._arms) if index % 2 == 0 else list(self._arms)[::-1]
        runs = {}
        for place, name in enumerate(order):
            engine, answer = self._arms[name], Answer()
            stream = engine.stream(item.messages, max_new_tokens=item.max_new_tokens, **SETTINGS)
            for event in answer.timed(stream):
                self._view.token(name, event, answer)
            answer.close(engine.take_events())
            runs[name] = _as_run(answer, engine, item, drafter=name, index=index, place=place)
        runs = {name: runs[name] for name in self._arms}
        self._view.end(item, runs)
        self._runs += runs.values()

    def measured(self) -> Measured:
        """What was measured, with every difference explained."""
        return Measured(
            config=_config(self._options, self._arms),
            runs=tuple(self._runs),
            differences=_differences(self._runs, self._arms[BASELINE]),
            failed={},
            other_cores=self._load.others(),
        )


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
            name: {"engine": "draftsmith", "backend": engine.backend_name, "fidelity": Fidelity.EXACT.value}
            for name, engine in arms.items()
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
