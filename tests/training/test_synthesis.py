"""Synthetic texts: pure functions of their number, every kind whole, every request as it should be."""

import itertools
import re
from dataclasses import replace

import pytest

from draftsmith.errors import OptionError, UnsupportedError
from draftsmith.training import regenerate, synthesis
from draftsmith.training.jobs import Reply, in_order
from draftsmith.training.openers import FOLLOW_UP_REQUESTS, FOLLOW_UPS, KINDS, SYSTEMS
from draftsmith.training.subjects import SLOTS
from draftsmith.training.synthesis import SynthesisOptions
from draftsmith.training.texts import Dropped
from draftsmith.training.turns import Turns
from tests.models.vocabularies import embedded
from tests.training.fakes import CHATML, Scribe, chat

EOS = embedded().eos_ids


@pytest.fixture(scope="module")
def turns():
    return Turns(chat(), embedded(), EOS)


def write(turns, count, first=0, at_once=4, scribe=None, **options):
    jobs = synthesis.jobs(turns, SynthesisOptions(**options), first)
    return list(itertools.islice(in_order(jobs, scribe or Scribe(), at_once=at_once), count))


def test_a_text_depends_on_its_number_alone(turns):
    whole = write(turns, 60, seed=3, second_turns=0.5)
    assert write(turns, 60, at_once=1, seed=3, second_turns=0.5) == whole
    assert write(turns, 20, first=40, at_once=16, seed=3, second_turns=0.5) == whole[40:]
    assert write(turns, 60, seed=4, second_turns=0.5) != whole


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_makes_whole_conversations(turns, kind):
    for text in write(turns, 40, kinds=(kind.name,), second_turns=0.5):
        roles = [message["role"] for message in text.messages]
        assert roles[0] in ("system", "user")
        assert roles[1 if roles[0] == "system" else 0 :] in (["user", "assistant"], ["user", "assistant"] * 2,
                                                            ["user", "assistant"] * 3)  # fmt: skip
        assert not any(re.search(r"\{\w+\}", message["content"]) for message in text.messages)
        assert text.answer_tokens > 0
        assert text.details["kind"] == kind.name


def test_every_brace_has_words():
    texts = [*FOLLOW_UPS, *FOLLOW_UP_REQUESTS, *SYSTEMS]
    for kind in KINDS:
        assert kind.openers or kind.requests
        texts += [*kind.openers, *kind.requests, *kind.passages, *kind.systems]
    names = {name for text in texts for name in re.findall(r"\{(\w+)\}", text)}
    assert {name.removesuffix("2") for name in names} <= {*SLOTS, "number", "text"}
    for kind in KINDS:
        assert all("{text}" in text for text in (*kind.openers, *kind.requests)) == bool(kind.passages)


def test_passages_are_spoken_of_where_they_stand(turns):
    pasted = said = 0
    for text in write(turns, 200, kinds=("summary", "reading"), second_turns=0.0):
        users, answers = text.said_by("user"), text.said_by("assistant")
        if len(users) == 2:
            said += 1
            assert "your text" in users[1]
        else:
            pasted += 1
            assert ("the text above" in users[0]) or ("the text below" in users[0])
            place = users[0].index("the text above") if "the text above" in users[0] else users[0].index("below")
            assert (place < users[0].index("\n\n")) == ("below" in users[0])
        assert len(answers) == len(users)
    assert 40 < said < 110
    assert pasted == 200 - said


def test_greedy_and_sampled_answers_are_mixed(turns):
    scribe = Scribe()
    texts = write(turns, 200, scribe=scribe, greedy=0.25, temperature=0.9, top_p=0.8, prompt_temperature=1.1)
    assert 25 < sum(text.temperature == 0 for text in texts) < 75
    assert {text.temperature for text in texts} == {0.0, 0.9}
    assert {request.temperature for request in scribe.requests} == {0.0, 0.9, 1.1}
    assert {request.temperature for request in scribe.requests if request.ids is not None} == {1.1}
    assert {request.top_p for request in scribe.requests if request.ids is None} == {0.8}


def test_second_turns(turns):
    plain = write(turns, 40, kinds=("question",), second_turns=0.0)
    assert {len(text.said_by("assistant")) for text in plain} == {1}
    two = write(turns, 40, kinds=("question",), second_turns=1.0)
    assert {len(text.said_by("assistant")) for text in two} == {2}
    for one, both in zip(plain, two, strict=True):
        assert both.messages[: len(one.messages)] == one.messages


def test_a_cut_answer_ends_the_text_and_is_flagged(turns):
    texts = write(turns, 60, kinds=("coding",), second_turns=1.0, scribe=Scribe(cut=(0, 1)))
    cut = [text for text in texts if not isinstance(text, Dropped) and text.finish_reason == "length"]
    assert cut
    assert any(len(text.said_by("assistant")) == 1 for text in cut)


def test_an_answer_that_ends_in_a_loop_is_cut_there(turns):
    """Greedy answers of small models do; what comes before the loop is worth keeping."""

    class Looping(Scribe):
        def reply(self, request):
            reply = super().reply(request)
            return reply if request.ids else replace(reply, text=reply.text + " round and round it goes" * 60)

    for text in write(turns, 20, kinds=("question",), second_turns=1.0, scribe=Looping()):
        (answer,) = text.said_by("assistant")
        assert text.finish_reason == "length"
        assert answer.count("round it goes") < 15
        assert text.answer_tokens == turns.num_tokens(answer)


def test_endless_and_refused_prompts_are_dropped(turns):
    assert {outcome.reason for outcome in write(turns, 10, kinds=("open",), scribe=Scribe(cut=range(7)))} == {
        "endless prompt"
    }
    refused = write(turns, 10, kinds=("talk",), scribe=Scribe(error="the prompt is too long"))
    assert {outcome.reason for outcome in refused} == {"refused: the prompt is too long"}


@pytest.mark.parametrize(
    "options",
    [
        {"greedy": 1.5},
        {"second_turns": -0.1},
        {"max_new_tokens": 0},
        {"prompt_temperature": 0.0},
        {"kinds": ("nonsense",)},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(OptionError, match=next(iter(options)).removesuffix("s")):
        SynthesisOptions(**options)


class TestTurns:
    """How a template's user turn is opened and ended."""

    def test_the_user_turn_is_opened(self, turns):
        tokenizer = embedded()
        system = [{"role": "system", "content": "Be kind."}]
        expected = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is"
        assert turns.user_ids(system, "What is") == tokenizer.encode(expected, special=True)

    def test_the_end_of_turn_ends_it_though_the_model_goes_on(self):
        """Templates may close a user's turn with a mark that does not end an answer."""
        tokenizer = embedded()
        template = CHATML.replace("<|im_end|>", "{{ '<|endoftext|>' if message.role == 'user' else '<|im_end|>' }}")
        turns = Turns(chat(template), tokenizer, frozenset({tokenizer.id_of("<|im_end|>")}))
        ids = tokenizer.encode(" a brick?<|endoftext|>\nA brick is", special=True)
        reply = Reply(text=tokenizer.decode(ids), finish_reason="length", num_tokens=len(ids), token_ids=ids)
        assert turns.written(reply) == (" a brick?", True)

    def test_a_text_may_end_the_turn(self):
        tokenizer = embedded()
        turns = Turns(chat("{% for m in messages %}[{{ m.content }} /END]{% endfor %}"), tokenizer, EOS)
        ids = tokenizer.encode(" a brick? /END] A brick", special=True)
        reply = Reply(text=tokenizer.decode(ids), finish_reason="length", num_tokens=len(ids), token_ids=ids)
        assert turns.written(reply) == (" a brick? ", True)

    def test_templates_without_a_system_message(self, turns):
        assert turns.takes_system
        refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
        other = Turns(chat(refusing), embedded(), EOS)
        assert not other.takes_system
        assert all(text.messages[0]["role"] == "user" for text in write(other, 30))

    def test_a_template_that_hides_the_user_is_refused(self):
        with pytest.raises(UnsupportedError):
            Turns(chat("{% for m in messages %}{{ m.content | upper }}{% endfor %}"), embedded(), EOS)


class TestRegenerate:
    """Answers to given prompts."""

    def run(self, conversations, scribe=None, first=0, **options):
        jobs = regenerate.jobs(conversations, regenerate.AnswerOptions(**options), first)
        return list(in_order(jobs, scribe or Scribe(), at_once=3))

    def test_turns_go_on_from_own_answers(self):
        talk = regenerate.Conversation(text_id="a", turns=["One?", "Two?"], system="Be kind.", category="x")
        scribe = Scribe()
        (text,) = self.run([talk], scribe, temperature=0.5)
        assert [message["role"] for message in text.messages] == ["system", *["user", "assistant"] * 2]
        assert scribe.requests[1].messages == text.messages[:-1]
        assert text.details == {"category": "x"}
        assert text.answer_tokens == sum(scribe.reply(request).num_tokens for request in scribe.requests)

    def test_a_later_start_gives_the_same(self):
        talks = [regenerate.Conversation(text_id=str(n), turns=[f"Say {n}."]) for n in range(9)]
        whole = self.run(talks, temperature=1.0)
        assert self.run(talks[5:], first=5, temperature=1.0) == whole[5:]

    def test_nothing_is_lost(self):
        talks = [regenerate.Conversation(text_id=str(n), turns=[f"Say {n}.", "Again."]) for n in range(30)]
        refused = self.run(talks, Scribe(error="too long"))
        assert [(outcome.text_id, outcome.reason) for outcome in refused] == [
            (str(n), "refused: too long") for n in range(30)
        ]
        cut = [text for text in self.run(talks, Scribe(cut=(0, 1, 2))) if text.details.get("unanswered_turns")]
        assert cut
        assert all(text.finish_reason == "length" and len(text.messages) == 2 for text in cut)

    def test_own_limits_count(self):
        scribe = Scribe()
        self.run([regenerate.Conversation(text_id="a", turns=["x"], max_new_tokens=7)], scribe, max_new_tokens=50)
        assert scribe.requests[0].max_new_tokens == 7
