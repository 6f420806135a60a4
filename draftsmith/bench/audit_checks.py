"""Checks that need no statistics: ids, ends, lengths, log-probabilities, counts.

Called by `bench.audit`, one function per line of the report; each takes a `Bench` (audited, plain, target, prompts)
and returns a `Check`. Requests go to the audited engine alone, again (drafters that learn know the answer by then),
and all at once. Invariant: what is expected comes from the plain engine's answers or from the request itself, never
from the audited engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftsmith.bench.audit_report import Check, Status
from draftsmith.bench.audit_subject import Answer, Asked, Audited, Target, Token
from draftsmith.bench.differences import first_difference
from draftsmith.core.random import RequestRandom
from draftsmith.core.stats import EventLog
from draftsmith.errors import DraftsmithError

LOGPROB_TOLERANCE = 1e-3
"""What rounding may do to a log-probability, where near ties are not wider still."""
_LENGTHS = (1, 2, 3, 5, 8)
_TIE_BET = 1.5  # wealth factor when an exact tie goes the wrong way; the other way it is 2 less this


class BrokeDown(Exception):
    """The audited engine failed on a request that it should serve; the cause is kept."""


@dataclass(kw_only=True)
class Bench:
    """Who is compared, on what, and what came of it so far.

    `target`: None for an endpoint, whose logits nobody sees. `near_tie`: gaps up to this are put down to rounding.
    """

    audited: Audited
    plain: Audited
    target: Target | None
    prompts: Sequence[Any]
    max_new_tokens: int
    near_tie: float
    alpha: float
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    log: EventLog = field(default_factory=EventLog)

    def ask(self, asked: Sequence[Asked]) -> list[list[Answer]]:
        """The audited engine's answers; what they cost is counted."""
        try:
            answers = self.audited.answer(asked)
        except DraftsmithError:
            raise
        except Exception as error:  # whatever breaks inside an audited engine is a finding
            raise BrokeDown(f"broke down: {type(error).__name__}: {error}".rstrip(": ")) from error
        self.tokens += sum(len(sample.tokens) for samples in answers for sample in samples)
        taken = self.audited.take_events()
        self.log = taken if taken is not None else EventLog()
        self.drafted += sum(record.drafted for record in self.log.requests)
        self.accepted += sum(record.accepted for record in self.log.requests)
        return answers

    def ask_plain(self, asked: Sequence[Asked]) -> list[Answer]:
        """The plain engine's answers, each request alone."""
        self.audited.rest()
        answers = [self.plain.answer([item])[0][0] for item in asked]
        self.plain.take_events()
        return answers

    def three_ways(self, asked: Sequence[Asked]) -> list[tuple[int, Answer]]:
        """Every request alone, alone again, and all at once, with the index of its prompt."""
        alone = [(index, self.ask([item])[0][0]) for _ in range(2) for index, item in enumerate(asked)]
        return [*alone, *enumerate(samples[0] for samples in self.ask(asked))]


def guarded(name: str, check: Any, *arguments: Any) -> Check:
    """Carry out a check; an engine that breaks down on it differs."""
    try:
        found: Check = check(name, *arguments)
        return found
    except BrokeDown as error:
        return Check(name=name, status=Status.DIFFERS, evidence=str(error))


def check_ids(name: str, bench: Bench, settings: Mapping[str, Any]) -> Check:
    """The same ids as the plain run; and, where the target can be asked, greedy tokens that are its argmax."""
    asked = [Asked(prompt=prompt, settings=settings) for prompt in bench.prompts]
    plain = bench.ask_plain(asked)
    accepted = bench.accepted
    compared, gaps, worst = 0, [], None
    for index, answer in bench.three_ways(asked):
        compared += len(answer.tokens)
        position = first_difference(plain[index].tokens, answer.tokens)
        if position is None:
            if answer.finish_reason != plain[index].finish_reason or answer.text != plain[index].text:
                return _differs(name, "same ids, another text or finish reason", asked[index])
            continue
        gap = _gap_at(bench, asked[index], plain[index], answer.tokens, position)
        if gap is None or gap > bench.near_tie:
            told = "unknown" if gap is None else f"{gap:.2g}"
            return _differs(
                name,
                f"leaves the plain ids at token {position + 1} (gap {told}, no near tie)",
                asked[index],
                position,
                gap,
            )
        gaps.append(gap)
        worst = asked[index] if gap == max(gaps) else worst
    if bench.accepted == accepted and bench.audited.tells_drafts:
        return Check(name=name, status=Status.NOT_TESTED, evidence="no draft was accepted")
    if gaps:
        assert worst is not None
        return Check(
            name=name,
            status=Status.NUMERICS,
            evidence=f"{len(gaps)} answers leave the plain ids at near ties, widest gap {max(gaps):.1e}",
            figures={"tokens": compared, "largest_gap": max(gaps)},
            reproduce=[worst.shown()],
        )
    return Check(name=name, status=Status.OK, evidence=f"{compared} tokens equal", figures={"tokens": compared})


def check_argmax(name: str, bench: Bench, settings: Mapping[str, Any]) -> Check:
    """Every greedy token is the target's argmax, the lowest id among equals."""
    assert bench.target is not None
    asked = [Asked(prompt=prompt, settings=settings) for prompt in bench.prompts]
    answers = bench.ask(asked)
    looked, ties, wealth, widest = 0, 0, 1.0, 0.0
    for item, samples in zip(asked, answers, strict=True):
        for judged in bench.target.judge(item, samples[0].tokens):
            looked += 1
            gap = judged.greedy_gap
            if gap > bench.near_tie:
                at = judged.position + 1
                return _differs(name, f"token {at} is not the argmax (gap {gap:.2g})", item, judged.position, gap)
            widest = max(widest, gap)
            equals = (judged.scores_V == judged.scores_V.max()).nonzero()[0]
            if gap == 0 and len(equals) > 1:
                # Rounding may tip a tie, but not time and again towards the later id.
                ties += 1
                wealth *= 2 - _TIE_BET if judged.token == equals[0] else _TIE_BET
                if wealth >= 1 / bench.alpha:
                    return _differs(name, f"exact ties go to a higher id ({ties} ties)", item, judged.position, 0.0)
    status = Status.NUMERICS if widest > 0 else Status.OK
    figures = {"tokens": looked, **({"largest_gap": widest} if widest > 0 else {})}
    told = f"{looked} tokens are the argmax" + (f", up to a gap of {widest:.1e}" if widest > 0 else "")
    return Check(name=name, status=status, evidence=told, figures=figures)


def check_stops(name: str, bench: Bench, settings: Mapping[str, Any]) -> Check:
    """Stop ids and stop strings in the middle of answers: text, ids and finish reason end where they must."""
    asked = [Asked(prompt=prompt, settings=settings) for prompt in bench.prompts]
    tried = 0
    for item, plain in zip(asked, bench.ask_plain(asked), strict=True):
        bench.ask([item])  # a drafter that learns knows what comes after the stop
        for stopped in _stops_of(bench, item, plain):
            for samples in (bench.ask([stopped]) for _ in range(2)):
                met, wrong = _stop_fault(bench, stopped, samples[0][0], plain)
                tried += met
                if wrong:
                    return _differs(name, wrong, stopped)
    if not tried:
        return Check(name=name, status=Status.NOT_TESTED, evidence="no stop was met inside an answer")
    return Check(name=name, status=Status.OK, evidence=f"{tried} stops inside answers", figures={"stops": tried})


def _stops_of(bench: Bench, item: Asked, plain: Answer) -> list[Asked]:
    tokens, text = plain.tokens, plain.text
    found: list[Asked] = []
    if bench.target is not None:
        for token in (tokens[int(share * len(tokens))] for share in (0.3, 0.6)):
            if token != tokens[0]:
                found.append(item.but(stop_ids=[token]))
    for at in (int(share * len(text)) for share in (0.4, 0.7)):
        stop = text[at : at + 3]
        if len(stop) == 3 and "\ufffd" not in stop and text.find(stop) > 0:
            found.append(item.but(stop=[stop]))
    return found


def _stop_fault(bench: Bench, asked: Asked, answer: Answer, plain: Answer) -> tuple[bool, str | None]:
    """Whether the stop was met, and what is wrong. The answer is judged by its own ids: it may part at a near tie."""
    tokens, late = answer.tokens, "goes on after the stop"
    (kind, (stop,)) = next((kind, asked.settings[kind]) for kind in ("stop_ids", "stop") if kind in asked.settings)
    if kind == "stop_ids":
        if stop in tokens[:-1]:
            return True, late
        is_met = tokens[-1:] == (stop,)
        return is_met, "a stop id came, no finish reason stop" if is_met and answer.finish_reason != "stop" else None
    if stop in answer.text:
        return True, "the text holds the stop string"
    if bench.target is None:
        expected = plain.text[: plain.text.find(stop)]
        if answer.text == expected:
            return True, None if answer.finish_reason == "stop" else "ended at a stop, no finish reason stop"
        nested = answer.text.startswith(expected) or expected.startswith(answer.text)
        return False, "the text does not end before the stop string" if nested else None
    if stop in bench.target.decode(tokens[:-1]):
        return True, late
    written = bench.target.decode(tokens)
    if stop not in written:
        return False, None
    if answer.finish_reason != "stop":
        return True, "a stop string came, no finish reason stop"
    is_cut = answer.text.strip() == written[: written.find(stop)].strip()
    return True, None if is_cut else "the text does not end before the stop string"


def check_lengths(name: str, bench: Bench, settings: Mapping[str, Any]) -> Check:
    """`max_new_tokens` is met exactly, with the plain run's first ids."""
    tried = 0
    more = {} if bench.target is None else {"ignore_eos": True}  # endpoints need not know it
    for prompt in bench.prompts:
        item = Asked(prompt=prompt, settings={**settings, **more})
        plain = bench.ask_plain([item])[0]
        bench.ask([item])
        longest = plain.num_tokens or 0
        for length in (*(n for n in _LENGTHS if n <= longest), longest):
            short = item.but(max_new_tokens=max(1, length))
            answer = bench.ask([short])[0][0]
            if answer.num_tokens is None:
                return Check(
                    name=name, status=Status.NOT_TESTED, evidence="the endpoint tells neither tokens nor usage"
                )
            tried += 1
            wrong = _length_fault(answer, max(1, length), may_end=bench.target is None)
            if wrong:
                return _differs(name, wrong, short)
    return Check(name=name, status=Status.OK, evidence=f"{tried} limits met exactly", figures={"limits": tried})


def _length_fault(answer: Answer, length: int, *, may_end: bool) -> str | None:
    count = answer.num_tokens
    ended = may_end and answer.finish_reason == "stop" and count is not None and count <= length
    if not ended and (count != length or answer.finish_reason != "length"):
        return f"{count} tokens for max_new_tokens {length}, finish reason {answer.finish_reason}"
    if answer.usage[0] is not None and answer.usage[0] != count:
        return f"usage says {answer.usage[0]} tokens, {count} came"
    return None


def check_logprobs(name: str, bench: Bench, settings: Mapping[str, Any]) -> Check:
    """The log-probability told with each token is the target's, or the plain engine's where logits are not seen."""
    asked = [Asked(prompt=prompt, settings={**settings, "logprobs": 1}) for prompt in bench.prompts]
    plain = bench.ask_plain(asked) if bench.target is None else []
    compared, widest = 0, 0.0
    for index, answer in bench.three_ways(asked):
        if answer.logprobs is None:
            return Check(name=name, status=Status.NOT_TESTED, evidence="the engine tells no log-probabilities")
        if len(answer.logprobs) != len(answer.tokens):
            told = f"{len(answer.logprobs)} log-probabilities for {len(answer.tokens)} tokens"
            return _differs(name, told, asked[index])
        if bench.target is not None:
            expected = [judged.logprob for judged in bench.target.judge(asked[index], answer.tokens)]
        else:
            shared = first_difference(plain[index].tokens, answer.tokens)
            # The token where they part has another log-probability; those before it should agree.
            expected = list((plain[index].logprobs or ())[:shared])
        for position, (told_value, value) in enumerate(zip(answer.logprobs, expected, strict=False)):
            compared += 1
            apart = abs(told_value - value)
            widest = max(widest, apart)
            if not apart <= max(LOGPROB_TOLERANCE, bench.near_tie):
                return _differs(
                    name, f"token {position + 1}: {told_value:.4f}, plain {value:.4f}", asked[index], position
                )
    return Check(
        name=name,
        status=Status.OK if compared else Status.NOT_TESTED,
        evidence=f"{compared} equal within {max(widest, 1e-9):.0e}",
        figures={"tokens": compared, "widest": widest},
    )


def check_counts(name: str, bench: Bench, settings: Mapping[str, Any]) -> Check:
    """The event log, the statistics and the ids tell the same story."""
    looked = 0
    for index, prompt in enumerate(bench.prompts):
        item = Asked(prompt=prompt, settings={**settings, "seed": index})
        for _ in range(2):
            answer = bench.ask([item])[0][0]
            wrong = _count_fault(answer, bench.log)
            looked += 1
            if wrong:
                return _differs(name, wrong, item)
    return Check(name=name, status=Status.OK, evidence=f"{looked} answers: log, statistics and ids agree")


def _count_fault(answer: Answer, log: EventLog) -> str | None:
    told, length = answer.statistics, len(answer.tokens)
    pairs = list(log.pairs())
    for record in log.requests:
        if record.accepted > record.depth or record.depth > record.drafted:
            return f"step {record.step}: {record.accepted} accepted of {record.drafted} drafted, depth {record.depth}"
        last = record.stop_reason is not None
        if (
            record.is_pair
            and record.emitted != record.accepted + 1
            and not (last and record.emitted == record.accepted)
        ):
            return f"step {record.step}: {record.emitted} emitted with {record.accepted} accepted, and nothing cut it"
    emitted = sum(record.emitted for record in log.requests)
    if emitted != length:
        return f"the event log holds {emitted} emitted tokens, the answer {length}"
    if told is None:
        return None
    counts = (told.emitted_tokens, told.steps, told.drafted_tokens, told.accepted_tokens)
    logged = (
        length,
        len(pairs),
        *(sum(getattr(record, field) for record in pairs) for field in ("drafted", "accepted")),
    )
    if counts != logged:
        return f"statistics say {counts} (emitted, steps, drafted, accepted), the event log {logged}"
    return None


def _gap_at(bench: Bench, asked: Asked, answer: Answer, other: Sequence[Token], position: int) -> float | None:
    """How far apart the plain choice and the other lie under the scores that made them; None where nobody can tell."""
    plain = answer.tokens
    if position >= min(len(plain), len(other)):
        return None
    if bench.target is None:
        known = answer.likeliest[position] if position < len(answer.likeliest) else {}
        values = [known.get(tokens[position]) for tokens in (plain, other)]
        return None if values[0] is None or values[1] is None else abs(values[0] - values[1])
    judged = next(item for item in bench.target.judge(asked, plain[: position + 1]) if item.position == position)
    scores_V, tokens = judged.scores_V, (judged.token, int(other[position]))
    temperature = asked.settings.get("temperature", 0.0)
    if temperature > 0:
        noise_V = RequestRandom(asked.settings.get("seed", 0)).target_gumbel(position, len(scores_V))
        scores_V = scores_V / temperature + noise_V
    return abs(float(scores_V[tokens[0]] - scores_V[tokens[1]]))


def _differs(name: str, told: str, asked: Asked, position: int | None = None, gap: float | None = None) -> Check:
    figures = {"position": position, "gap": gap} if position is not None else {}
    return Check(name=name, status=Status.DIFFERS, evidence=told, figures=figures, reproduce=[asked.shown()])
