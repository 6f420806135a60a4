"""Prompts cut and filled to a number of tokens, under tokenizers whose tokens join across seams or split characters."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.bench.prompts import Prompt, read_source
from draftsmith.bench.workloads.lengths import LengthTier, fit_prompts, fit_text, parse_tiers
from draftsmith.errors import OptionError, PromptError


class Bytes:
    """A token per byte: a cut may fall inside a character."""

    @staticmethod
    def encode(text):
        return list(text.encode())

    @staticmethod
    def decode(ids):
        return bytes(ids).decode(errors="replace")


class Words:
    """A token per word with the blanks before it: what stands on the two sides of a seam can become one token."""

    def __init__(self):
        self.ids = {}
        self.words = []

    def encode(self, text):
        found = []
        for word in re.findall(r"\s*\w+|\s*[^\w\s]+|\s+$", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            found.append(self.ids[word])
        return found

    def decode(self, ids):
        return "".join(self.words[index] for index in ids)


@pytest.fixture(params=[Bytes, Words])
def tokens(request):
    return request.param()


BUILTIN = read_source("builtin").prompts


@pytest.mark.parametrize("length", [16, 40, 200, 1000])
def test_lengths_are_met(tokens, length):
    fitted = fit_prompts(BUILTIN, LengthTier(input_len=length, output_len=7), tokens.encode, tokens.decode)
    lengths = [len(tokens.encode(prompt.text)) for prompt in fitted]
    assert max(lengths) <= length
    assert min(lengths) >= length - 10
    assert sum(found == length for found in lengths) >= 0.7 * len(lengths)
    for before, after in zip(BUILTIN, fitted, strict=True):
        assert (after.prompt_id, after.category, after.turns[1:]) == (
            before.prompt_id,
            before.category,
            before.turns[1:],
        )
        assert after.max_new_tokens == 7


def test_a_cut_keeps_both_ends_and_a_filling_stands_in_front():
    text = "Summarise this. " + "x" * 500 + " In one sentence!"
    cut = fit_text(text, 100, Bytes.encode, Bytes.decode, texts=())
    assert cut.startswith("Summarise this. ")
    assert cut.endswith(" In one sentence!")
    assert "\n[...]\n" in cut
    filled = fit_text(
        "My question?", 60, Bytes.encode, Bytes.decode, texts=("First text. " * 2, "Another text, longer.")
    )
    assert filled.startswith("First text. First text. \n\nAnother")
    assert filled.endswith("\n\n---\n\nMy question?")
    assert len(filled) == 60


def test_a_cut_leaves_no_half_characters():
    cut = fit_text("äöü€" * 40, 40, Bytes.encode, Bytes.decode, texts=())
    filled = fit_text("Why?", 41, Bytes.encode, Bytes.decode, texts=("äöü€" * 20,))
    assert set(cut) <= set("äöü€\n[.]")
    assert set(filled) <= set("äöü€\n-Why?")


def test_what_fills_is_text_of_the_workload_once_and_in_an_order_of_its_own():
    fitted = fit_prompts(BUILTIN, LengthTier(input_len=3000), Bytes.encode, Bytes.decode, seed=1)
    again = fit_prompts(BUILTIN, LengthTier(input_len=3000), Bytes.encode, Bytes.decode, seed=1)
    other = fit_prompts(BUILTIN, LengthTier(input_len=3000), Bytes.encode, Bytes.decode, seed=2)
    assert fitted == again != other
    assert len({prompt.text[:40] for prompt in fitted}) > 20
    known = {prompt.text for prompt in BUILTIN}
    for prompt in fitted:
        filling = prompt.text.rpartition("\n\n---\n\n")[0]
        whole = [text for text in known if text in filling]
        assert all(filling.count(text) == 1 for text in whole)
        # All but the last text, which is cut, is there whole.
        assert sum(map(len, whole)) + 2 * len(whole) >= len(filling) - max(map(len, known))


def test_text_that_does_not_suffice_is_refused_by_name():
    prompts = [Prompt(prompt_id="short", turns=("Hi",))]
    with pytest.raises(PromptError, match="prompt short: 91 tokens are missing and the other prompts hold only 0"):
        fit_prompts(prompts, LengthTier(input_len=100), Bytes.encode, Bytes.decode, texts=["Hi"])


def test_a_text_that_nearly_fits_stays():
    assert fit_text("a" * 97, 100, Bytes.encode, Bytes.decode, texts=("b" * 50,)) == "a" * 97
    assert fit_text("a" * 100, 100, Bytes.encode, Bytes.decode, texts=()) == "a" * 100


def test_a_tier_of_output_alone_keeps_the_texts():
    fitted = fit_prompts(BUILTIN, LengthTier(output_len=5), Bytes.encode, Bytes.decode)
    assert [prompt.turns for prompt in fitted] == [prompt.turns for prompt in BUILTIN]
    assert {prompt.max_new_tokens for prompt in fitted} == {5}


@settings(max_examples=60)
@given(text=st.text(min_size=1, max_size=80).filter(str.strip), length=st.integers(16, 60))
def test_any_text_comes_to_a_length_not_above(text, length):
    for tokens in (Bytes(), Words()):
        try:
            fitted = fit_text(text, length, tokens.encode, tokens.decode, texts=("Some words to fill with, " * 6,))
        except PromptError:
            continue
        assert len(tokens.encode(fitted)) <= length
        fitted.encode()


def test_tiers_from_text():
    assert parse_tiers("128:64,1k:256, 8k,:32") == (
        LengthTier(input_len=128, output_len=64),
        LengthTier(input_len=1024, output_len=256),
        LengthTier(input_len=8192),
        LengthTier(output_len=32),
    )
    assert [str(tier) for tier in parse_tiers("1k:2,64,:3")] == ["1024:2", "64", ":3"]
    for text in ("", ":", "a", "12:b", "1.5", "-5", "1:2:3", "64,", "8", "64:0", "9" * 99):
        with pytest.raises(OptionError):
            parse_tiers(text)
    with pytest.raises(OptionError):
        LengthTier()
