"""What stands between the options of `draftsmith bench` and a measurement: checks, prompts, arms, configuration.

Called by `bench`. Invariant: `check` finds everything that can be wrong with the options, and loads no model.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from draftsmith.bench.arms import Arm, Description, Message, RunInfo, check_arm, make_arm
from draftsmith.bench.arrivals import Arrivals, ClosedLoop, OpenLoop, parse_arrivals, plan
from draftsmith.bench.environment import hardware, versions
from draftsmith.bench.latency import Targets
from draftsmith.bench.own_arm import OwnArm
from draftsmith.bench.prompts import Loaded, Prompt, read_source
from draftsmith.bench.repeats import Plan
from draftsmith.bench.runner import Encode, Workload, usable_prompts
from draftsmith.bench.runs import BASELINE
from draftsmith.bench.summary import SCHEMA
from draftsmith.bench.workloads.lengths import LengthTier, fit_prompts, parse_tiers
from draftsmith.cli.console import note
from draftsmith.cli.loading import load_arms, request_settings, split_arm
from draftsmith.cli.options import BenchOptions
from draftsmith.control.choice import make_controller
from draftsmith.core.fidelity import Fidelity, marked
from draftsmith.errors import OptionError, PromptError
from draftsmith.registry import DRAFTERS, load_class, parse_selection

if TYPE_CHECKING:
    from draftsmith.engine.engine import Engine

# An open loop may have any number of requests under way; so many share a step.
_OPEN_LOOP_BATCH = 8
_EXACT_RULE = "coupling"
_MOST_AT_ONCE = 512
"""Rows of a step that our engine plans with, one for each sequence at least."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options, read and found sound. `names`: of all arms, ours first."""

    options: BenchOptions
    drafters: Sequence[str]
    peers: Sequence[str]
    names: Sequence[str]
    baseline: str
    targets: Targets
    plan: Plan
    tiers: Sequence[LengthTier]
    loaded: Loaded
    sent: ClosedLoop | OpenLoop

    @property
    def load(self) -> str:
        """How requests are sent, as it was written."""
        return self.options.load or f"closed:{self.options.concurrency}"

    @property
    def batch(self) -> int:
        """Requests that our engines serve in one step."""
        return self.sent.concurrency if isinstance(self.sent, ClosedLoop) else _OPEN_LOOP_BATCH


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Everything to measure with. `judge`: an engine of ours that can look at differing choices, None without one.

    `usable`, `failed`: indices of prompts, and the reasons of those that no arm can take.
    """

    arms: Mapping[str, Arm]
    workload: Workload
    encode: Encode
    judge: Engine | None
    usable: Sequence[int]
    failed: Mapping[int, str]


def check(options: BenchOptions) -> Asked:
    """Raises `UserError`s for whatever is wrong."""
    drafters = _names("--drafters", options.drafters)
    peers = list(options.peer)
    if not drafters and not peers:
        raise OptionError("nothing to measure: name drafters (--drafters none,suffix) or engines (--peer ...)")
    if drafters and BASELINE not in drafters:
        drafters.insert(0, BASELINE)
        note(f"the arm {BASELINE} was added: every comparison needs its baseline")
    named = [check_arm(text) for text in peers]
    for name in drafters:
        drafter, controller = split_arm(name, options.controller)
        load_class(parse_selection(drafter, DRAFTERS, "drafter"))
        make_controller(controller)
        if drafter == BASELINE and name != BASELINE:
            raise OptionError(f"{name}: {BASELINE} drafts nothing, so it takes no controller")
    request_settings(options, max_new_tokens=options.max_new_tokens, ignore_eos=options.ignore_eos)
    own = [marked(drafter, _fidelity(_rule(options, drafter))) for drafter in drafters]
    names = _unique("--drafters and --peer", [*own, *named])
    baseline = options.baseline or names[0]
    if baseline not in names:
        raise OptionError(f"--baseline {baseline!r} is none of the arms: {', '.join(names)}")
    if not options.timeout > 0:
        raise OptionError(f"timeout must be above 0 seconds, got {options.timeout}")
    targets = Targets.parse(options.targets)
    repeats = Plan(repeats=options.repeats, precision=options.precision, max_seconds=options.max_seconds)
    tiers = parse_tiers(options.lengths) if options.lengths else ()
    arrivals = parse_arrivals(options.load or f"closed:{options.concurrency}")
    _check_load(options, arrivals, at_most=_MOST_AT_ONCE if drafters else None)
    loaded = _prompts(options)
    num_prompts = len(loaded.prompts) * max(len(tiers), 1)
    sent = plan(arrivals, num_requests=options.requests, num_prompts=num_prompts, seed=options.seed)
    if isinstance(sent, OpenLoop):
        sent.prompts(range(num_prompts))
        for line in sent.skipped:
            note(f"left out of the trace: {line}")
        note(f"{len(sent.times)} requests, the last {sent.times[-1]:.3g} s after the first")
    return Asked(
        options=options,
        drafters=drafters,
        peers=peers,
        names=names,
        baseline=baseline,
        targets=targets,
        plan=repeats,
        tiers=tiers,
        loaded=loaded,
        sent=sent,
    )


def prepare(asked: Asked) -> Ready:
    """Load what is needed and make the arms. Raises `UserError`s."""
    options = asked.options
    engines = load_arms(options, asked.drafters, concurrency=asked.batch) if asked.drafters else {}
    judge = next(iter(engines.values()), None)
    prompts = _at_lengths(asked.loaded.prompts, asked.tiers, judge, options.seed)
    workload = _workload(asked, prompts, judge)
    most = _most(asked)
    own = [OwnArm(name, engine, max_concurrency=most, rule=_rule(options, name)) for name, engine in engines.items()]
    info = _run_info(options, workload, judge)
    encode: Encode = own[0].encode if own else _no_ids
    usable, failed = usable_prompts(workload, encode)
    if not usable:
        raise PromptError(f"no prompt of {options.prompts} can be used; the first: {next(iter(failed.values()))}")
    if isinstance(asked.sent, OpenLoop):
        asked.sent.prompts(usable)
    if failed:
        note(f"{len(failed)} prompts cannot be used and count as failed; the first: {next(iter(failed.values()))}")
    return Ready(
        arms={arm.name: arm for arm in [*own, *(make_arm(text, info) for text in asked.peers)]},
        workload=workload,
        encode=encode,
        judge=judge,
        usable=usable,
        failed=failed,
    )


def config_of(asked: Asked, ready: Ready, descriptions: Mapping[str, Description]) -> dict[str, Any]:
    """What a bundle's `config.json` holds."""
    written = dataclasses.asdict(asked.options)
    for name in ("json", "force", "output", "drafters", "peer"):
        del written[name]
    loaded = asked.loaded
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **written,
        "arms": list(asked.names),
        "baseline": asked.baseline,
        "load": asked.load,
        "targets": dataclasses.asdict(asked.targets),
        "prompts_sha256": loaded.sha256,
        "prompts_read_as": list(loaded.formats),
        "prompts_left_out": dict(loaded.skipped),
        "trace_left_out": list(asked.sent.skipped) if isinstance(asked.sent, OpenLoop) else [],
        "num_prompts": len(ready.workload.prompts),
        "failed_prompts": {str(index): reason for index, reason in ready.failed.items()},
        "descriptions": {name: dataclasses.asdict(found) for name, found in descriptions.items()},
        "hardware": hardware(asked.options.threads),
        "versions": versions(),
    }


def _no_ids(messages: Sequence[Message] | None, text: str) -> None:
    """Without a model of ours every engine encodes for itself."""


def _most(asked: Asked) -> int:
    """Requests our engine is handed at once: all that are due, where it is an open loop; it has a queue of its own."""
    return asked.sent.concurrency if isinstance(asked.sent, ClosedLoop) else len(asked.sent.times)


def _rule(options: BenchOptions, drafter: str) -> str:
    """An arm's rule. The plain arm is what the others are held against, so it is exact whatever was asked for."""
    is_exact = _fidelity(options.rule) is Fidelity.EXACT
    return options.rule if is_exact or drafter != BASELINE else _EXACT_RULE


def _fidelity(rule: str) -> Fidelity:
    from draftsmith.core.inexact import fidelity_of
    from draftsmith.engine.params import parse_rule

    return fidelity_of(parse_rule(rule))


def _names(flag: str, text: str) -> list[str]:
    """Drafter selections from a comma-separated list; "-" is none of ours."""
    if text.strip() == "-":
        return []
    named = [part.strip() for part in text.split(",")]
    if not all(named):
        raise OptionError(f"{flag} {text!r} has an empty name; write them as none,ngram,suffix")
    return _unique(flag, named)


def _unique(flag: str, named: Sequence[str]) -> list[str]:
    doubled = {name for name in named if named.count(name) > 1}
    if doubled:
        raise OptionError(f"{flag} names {', '.join(sorted(doubled))} more than once")
    return list(named)


def _run_info(options: BenchOptions, workload: Workload, judge: Engine | None) -> RunInfo:
    """What other engines are told: room for the longest conversation, and our tokenizer where there is one."""
    if judge is None:
        return RunInfo(threads=options.threads or len(os.sched_getaffinity(0)))
    tokenizer = judge.tokenizer
    longest = 0
    for prompt in workload.prompts:
        said = sum(len(tokenizer.encode(turn, special=False)) for turn in (*prompt.turns, prompt.system or ""))
        answers = len(prompt.turns) * (prompt.max_new_tokens or workload.max_new_tokens)
        longest = max(longest, said + answers + 64 * (1 + len(prompt.turns)))  # marks of the chat template
    room = min(max(2048, longest), judge.spec.max_context)
    return RunInfo(
        threads=options.threads or len(os.sched_getaffinity(0)),
        context_len=room,
        count_tokens=lambda text: len(tokenizer.encode(text, special=False)),
        decode=tokenizer.decode,
    )


def _check_load(options: BenchOptions, arrivals: Arrivals, *, at_most: int | None) -> None:
    """Nothing that is asked for is left undone in silence."""
    if isinstance(arrivals, ClosedLoop) and at_most is not None and arrivals.concurrency > at_most:
        raise OptionError(
            f"concurrency must be at most {at_most} where our own engines take part, got {arrivals.concurrency}"
        )
    if options.load and options.concurrency != 1:
        raise OptionError(
            f"--concurrency {options.concurrency} and --load {options.load} both say how requests are sent; give one"
        )
    if options.requests is not None and isinstance(arrivals, ClosedLoop):
        raise OptionError("--requests is for loads that send at times of their own; --limit chooses the prompts")


def _prompts(options: BenchOptions) -> Loaded:
    """The prompts, and a note on whatever of them does not count."""
    for name in ("limit", "per_category"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise OptionError(f"{name} must be at least 1, got {value}")
    loaded = read_source(
        options.prompts, limit=options.limit, per_category=options.per_category, max_turns=options.max_turns
    )
    for reason, number in loaded.skipped.items():
        note(f"{number} entries of {options.prompts} were left out: {reason}")
    return loaded


def _at_lengths(
    prompts: Sequence[Prompt], tiers: Sequence[LengthTier], judge: Engine | None, seed: int
) -> Sequence[Prompt]:
    """The prompts once for each tier of lengths, or as they are."""
    if not tiers:
        return prompts
    if judge is None:
        raise OptionError("--lengths counts tokens with our model's tokenizer: name a drafter too, at least none")
    tokenizer = judge.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    return [
        dataclasses.replace(prompt, category=str(tier))
        for tier in tiers
        for prompt in fit_prompts(prompts, tier, encode, tokenizer.decode, seed=seed)
    ]


def _workload(asked: Asked, prompts: Sequence[Prompt], judge: Engine | None) -> Workload:
    options = asked.options
    return Workload(
        prompts=prompts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        end_ids=frozenset() if judge is None else judge.eos_ids,
        ignore_eos=options.ignore_eos,
        concurrency=asked.batch,
        open_loop=asked.sent if isinstance(asked.sent, OpenLoop) else None,
        seed=options.seed,
        raw=options.raw,
        timeout=options.timeout,
    )
