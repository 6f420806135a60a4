"""What is sifted out of synthetic texts."""

import random

import pytest

from draftsmith.errors import OptionError
from draftsmith.training.sieve import Sieve, SieveOptions, loop_start, pieces, repeated_share
from draftsmith.training.texts import Text
from tests.training.fakes import WORDS

PROMPT = "Tell me something about rivers."


def text(prompt=PROMPT, answer="They flow into the sea."):
    return Text(messages=[{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])


def babble(seed, length=120):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(length))


def test_good_texts_pass():
    sieve = Sieve()
    assert [sieve.judge(text(f"{PROMPT} {number}", babble(number))) for number in range(20)] == [None] * 20


@pytest.mark.parametrize(
    ("prompt", "answer", "reason"),
    [
        ("Hi", "Hello to you, my friend.", "short prompt"),
        (PROMPT, "...", None),
        (PROMPT, "No", "short answer"),
        (PROMPT, "They \ufffd flow.", "broken characters"),
        (PROMPT, "and then the river flows on and on " * 20, "repetition"),
        (babble(1, 20) + " one two three four five six seven" * 20, "They flow.", "repetition"),
        (PROMPT, "我们去河边。" * 20, "repetition"),
    ],
)
def test_faults(prompt, answer, reason):
    assert Sieve().judge(text(prompt, answer)) == reason


def test_the_same_prompt_or_answer_again():
    sieve = Sieve()
    assert sieve.judge(text(answer=babble(1))) is None
    assert sieve.judge(text(PROMPT.upper(), babble(2))) == "same prompt"
    assert sieve.judge(text("Tell me something about hills.", babble(1))) == "same answer"
    assert sieve.judge(text("Is it so, tell me?", "Yes, it is.")) is None
    assert sieve.judge(text("And is that so too?", "Yes, it is.")) is None


def test_near_duplicates():
    words = babble(3, 300).split()
    sieve = Sieve()
    assert sieve.judge(text(answer=" ".join(words))) is None
    words[150] = "ocean"
    assert sieve.judge(text("Tell me of rivers, please.", " ".join(words))) == "near duplicate"
    assert sieve.judge(text("Tell me of rivers, please.", " ".join(words[:150]) + babble(4, 200))) is None


def test_a_dropped_text_is_not_remembered():
    sieve = Sieve()
    assert sieve.judge(text(answer="No")) == "short answer"
    assert sieve.judge(text(answer=babble(1))) is None


def test_kept_texts_of_an_earlier_run_count():
    first, second = Sieve(), Sieve()
    texts = [text(f"{PROMPT} {number % 7}", babble(number % 11)) for number in range(40)]
    verdicts = [first.judge(item) for item in texts]
    for item, verdict in zip(texts[:20], verdicts, strict=False):
        if verdict is None:
            second.keep(item)
    assert [second.judge(item) for item in texts[20:]] == verdicts[20:]


def test_repeated_share():
    assert repeated_share(pieces(babble(1, 30))) == 0
    assert repeated_share(["a"] * 100) > 0.9
    assert repeated_share(pieces(babble(2, 200) + " . " + babble(2, 200))) == pytest.approx(0.5, abs=0.05)


def test_a_loop_is_found_where_it_begins():
    before = babble(5, 80)
    loop = "and round and round it goes, "
    place = loop_start(before + " " + loop * 30)
    assert place is not None
    assert len(before) < place < len(before) + 8 * len(loop)
    assert before in (before + " " + loop * 30)[:place]


def test_texts_that_leave_their_loop_or_have_none_are_whole():
    loop = "and round and round it goes, "
    for text_ in ("", "Yes.", loop, babble(6, 300), babble(6, 50) + loop * 10 + babble(7, 80)):
        assert loop_start(text_) is None


def test_options_are_checked():
    with pytest.raises(OptionError, match="near"):
        SieveOptions(near=0)
