"""Prompts of a wanted length: cut, or filled with real text, to a number of tokens of the target.

Called by benchmarks that compare lengths. A tier `1024:256` asks for 1024 tokens in and 256 out.

How: tokens are those of the first turn's text, without chat template and system message. A longer text loses its
middle, since what is asked stands at the beginning or at the end; `[...]` marks the place. A shorter one gets other
texts in front of it, whole paragraphs of prose, code and questions, closed by a line `---`, so that its own request
comes last. Random tokens would be quick to make and wrong to measure: nothing can be predicted in them.
The texts in front are other prompts of the workload and the built-in ones, each at most once per prompt and in an
order drawn from the seed and the prompt's id, so that prompts share no beginning and nothing repeats that did not
repeat before. Invariant: a fitted text encodes to the wanted number of tokens; where no cut does (tokens of the two
sides of a seam can join), to the largest smaller number that was found.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.bench.workloads.builtin import BUILTIN_PROMPTS
from draftsmith.bench.workloads.prompt import Prompt
from draftsmith.errors import OptionError, PromptError

Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]

_CUT = "\n[...]\n"
_PART = "\n\n"
_CLOSED = "\n\n---\n\n"
# Fewer tokens than this cannot hold a request, and the marks would be most of them.
_SHORTEST = 16
# Steps towards the wanted number, then places tried around where they led.
_STEPS, _AROUND = 12, 12


@dataclass(frozen=True, kw_only=True)
class LengthTier:
    """Tokens in and tokens out; None leaves the prompts, or the run's limit, as they are."""

    input_len: int | None = None
    output_len: int | None = None

    def __post_init__(self) -> None:
        if self.input_len is None and self.output_len is None:
            raise OptionError("a length tier names tokens in, tokens out, or both: 1024:256, 1024 or :256")
        if self.input_len is not None and self.input_len < _SHORTEST:
            raise OptionError(f"input_len must be at least {_SHORTEST}, got {self.input_len}")
        if self.output_len is not None and self.output_len < 1:
            raise OptionError(f"output_len must be at least 1, got {self.output_len}")

    def __str__(self) -> str:
        return ("" if self.input_len is None else str(self.input_len)) + (
            "" if self.output_len is None else f":{self.output_len}"
        )


def parse_tiers(text: str) -> tuple[LengthTier, ...]:
    """Tiers from their command-line form: `128:64,1k:256,8k`. A `k` stands for 1024."""
    tiers = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,9}k?)?(?::(\d{1,9}k?))?\s*", part)
        if found is None or not any(found.groups()):
            raise OptionError(f"{part.strip()!r} is no length tier; write tokens in and out as 1024:256, 1k or :256")
        tiers.append(LengthTier(input_len=_number(found[1]), output_len=_number(found[2])))
    return tuple(tiers)


def fit_prompts(
    prompts: Sequence[Prompt],
    tier: LengthTier,
    encode: Encode,
    decode: Decode,
    *,
    seed: int = 0,
    texts: Sequence[str] | None = None,
) -> list[Prompt]:
    """The prompts at a tier's lengths. `encode` and `decode` are the target's, without special tokens.

    `texts`: what to fill with; by default the first turns of `prompts` and of the built-in set. Raises `PromptError`
    naming a prompt for which they are too short: text that repeats would flatter every drafter that copies.
    """
    if texts is None:
        texts = [prompt.text for prompt in (*prompts, *BUILTIN_PROMPTS)]
    texts = list(dict.fromkeys(texts))
    fitted = []
    for prompt in prompts:
        turns = prompt.turns
        if tier.input_len is not None:
            order = [text for text in texts if text != prompt.text]
            random.Random(f"{seed}/{prompt.prompt_id}").shuffle(order)
            try:
                first = fit_text(prompt.text, tier.input_len, encode, decode, texts=order)
            except PromptError as error:
                raise PromptError(f"prompt {prompt.prompt_id}: {error}") from error
            turns = (first, *turns[1:])
        limit = prompt.max_new_tokens if tier.output_len is None else tier.output_len
        fitted.append(dataclasses.replace(prompt, turns=turns, max_new_tokens=limit))
    return fitted


def fit_text(text: str, length: int, encode: Encode, decode: Decode, *, texts: Sequence[str]) -> str:
    """`text` cut or filled to `length` tokens, with `texts` in the order given. Raises `PromptError` if they run out.

    A text that lacks fewer tokens than the mark between it and others costs stays as it is.
    """
    ids = encode(text)
    if len(ids) == length:
        return text
    if len(ids) > length:

        def cut(kept: int) -> str:
            head, tail = (kept + 1) // 2, kept // 2
            return _decode(decode, ids[:head]) + _CUT + _decode(decode, ids[len(ids) - tail :])

        found = _search(cut, length, encode, start=length - len(encode(_CUT)), most=len(ids) - 1)
        if found is None:
            raise PromptError(f"a text of {len(ids)} tokens cannot be cut to {length}")
        return found

    missing = length - len(ids) - len(encode(_CLOSED))
    if missing < 1:
        return text
    filling = _gather(texts, missing, encode)
    if len(filling) < missing:
        raise PromptError(
            f"{missing} tokens are missing and the other prompts hold only {len(filling)}; "
            "give data with longer texts, or a shorter input_len"
        )

    def fill(taken: int) -> str:
        return _decode(decode, filling[:taken]) + _CLOSED + text

    found = _search(fill, length, encode, start=missing, most=len(filling))
    return text if found is None else found


def _search(make: Callable[[int], str], length: int, encode: Encode, *, start: int, most: int) -> str | None:
    """The text of `make(n)`, 1 <= n <= most, with `length` tokens, or with the most below; None if all have more."""
    best: tuple[int, str] | None = None
    tried: set[int] = set()

    def attempt(n: int) -> int:
        """Tokens still missing."""
        nonlocal best
        tried.add(n)
        made = make(n)
        tokens = len(encode(made))
        if tokens <= length and (best is None or tokens > best[0]):
            best = (tokens, made)
        return length - tokens

    place = min(max(start, 1), most)
    for _ in range(_STEPS):
        missing = attempt(place)
        if not missing:
            break
        following = min(max(place + missing, 1), most)
        if following in tried:
            break
        place = following
    for step in range(1, _AROUND + 1):
        for n in (place - step, place + step):
            if (best is None or best[0] < length) and 1 <= n <= most and n not in tried:
                attempt(n)
    return None if best is None else best[1]


def _gather(texts: Sequence[str], wanted: int, encode: Encode) -> list[int]:
    """Tokens of the texts, one after another, until there are some more than wanted."""
    parts: list[str] = []
    num_tokens = 0
    for text in texts:
        if num_tokens >= wanted + _AROUND:
            break
        parts.append(text)
        num_tokens += len(encode(_PART + text))
    return encode(_PART.join(parts)) if parts else []


def _decode(decode: Decode, ids: list[int]) -> str:
    """The text of the ids without the halves of characters at its ends that a cut between tokens may leave."""
    return decode(ids).strip("\ufffd")


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)
