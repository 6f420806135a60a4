"""Which tokens belong to an answer, against the engine's own way of asking, under templates of all manners."""

import random

import pytest
from hypothesis import given, settings

from draftsmith.training.masking import Masker, Unmasked
from draftsmith.training.texts import Text
from draftsmith.training.turns import encode_rendered
from tests.models.vocabularies import embedded, sentencepiece, spellable
from tests.training.fakes import CHATML, WORDS, chat

EOS = frozenset({embedded().id_of("<|im_end|>")})
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is a brick?"},
    {"role": "assistant", "content": "A brick is a block of clay."},
    {"role": "user", "content": "And a stone?"},
    {"role": "assistant", "content": "Older than that."},
]


def mask(messages, template=CHATML, finish_reason="stop", tokenizer=None, eos_ids=EOS):
    text = Text(messages=messages, finish_reason=finish_reason)
    return Masker(chat(template), tokenizer or embedded(), eos_ids).mask(text)


def slow_mask(messages, finish_reason="stop", template=CHATML):
    """Literally: the prompt's tokens, then the answer's and the end token, turn by turn."""
    tokenizer, tokens, answer = embedded(), [], []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.encode(chat(template).render(messages[:place], add_generation_prompt=True), special=True)
        said = tokenizer.encode(message["content"], special=True)
        if finish_reason == "stop" or place < len(messages) - 1:
            said += sorted(EOS)
        assert prompt[: len(tokens)] == tokens
        answer += [False] * (len(prompt) - len(tokens)) + [True] * len(said)
        tokens = prompt + said
    return tokens, answer


def as_pairs(masked):
    return [(item.tokens, item.answer) for item in masked]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("last", [3, 5])
def test_answers_and_their_end_tokens(finish_reason, last):
    assert as_pairs(mask(CONVERSATION[:last], finish_reason=finish_reason)) == [
        slow_mask(CONVERSATION[:last], finish_reason)
    ]


def test_marked_tokens_read_as_the_answers():
    (found,) = mask(CONVERSATION)
    marked = [token for token, is_answer in zip(found.tokens, found.answer, strict=True) if is_answer]
    assert embedded().decode(marked) == "A brick is a block of clay.Older than that."
    assert sum(token in EOS for token in marked) == 2
    (cut,) = mask(CONVERSATION, finish_reason="length")
    assert cut.tokens == found.tokens[:-1]


@pytest.mark.parametrize("seed", range(20))
def test_random_conversations(seed):
    draw = random.Random(seed)
    messages = []
    for _ in range(draw.randint(1, 4)):
        for role in ("user", "assistant"):
            content = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))
            messages.append({"role": role, "content": content + draw.choice(["", ".", "?", "\n\n```py\nx = 1\n```"])})
    assert as_pairs(mask(messages)) == [slow_mask(messages)]


@settings(max_examples=60)
@given(question=spellable, said=spellable.filter(lambda text: bool(text.strip())))
def test_any_text_is_marked_from_its_prompt_on(question, said):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    (found,) = mask(messages)
    prompt = embedded().encode(chat().render(messages[:1], add_generation_prompt=True), special=True)
    start = found.answer.index(True)
    assert all(found.answer[start:])
    assert found.tokens[-1] in EOS
    # A token across the border counts as the answer's: it may be one earlier, never later.
    assert len(prompt) - 1 <= start <= len(prompt)
    assert found.tokens[:start] == prompt[:start]


def test_what_follows_the_last_answer_is_left_out():
    (found,) = mask([*CONVERSATION, {"role": "user", "content": "Thanks."}])
    assert as_pairs([found]) == [slow_mask(CONVERSATION)]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_history_gives_each_answer_as_it_was_asked_for():
    """Reasoning models' templates drop old thoughts: the last answer has them, earlier ones had them then."""
    messages = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>hm</think>Yes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>well</think>No."},
    ]
    first, second = mask(messages, THINKING)
    assert as_pairs([first]) == [slow_mask(messages[:2], template=THINKING)]
    tokenizer = embedded()
    prompt = tokenizer.encode(chat(THINKING).render(messages[:3], add_generation_prompt=True), special=True)
    said = [*tokenizer.encode("<think>well</think>No.", special=True), *EOS]
    assert (second.tokens, second.answer) == (prompt + said, [False] * len(prompt) + [True] * len(said))


@pytest.mark.parametrize(
    ("template", "part"),
    [
        (CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"), "own prompt"),
        (CHATML.replace("{{ message['content'] }}", "{{ message['content'] | upper }}"), "rewrites the answer"),
        (CHATML + "{{ raise_exception('not today') }}", "not today"),
    ],
)
def test_templates_that_cannot_be_masked_are_noticed(template, part):
    with pytest.raises(Unmasked, match=part):
        mask(CONVERSATION, template)


def test_a_text_without_an_answer():
    with pytest.raises(Unmasked, match="no answer"):
        mask(CONVERSATION[:2])


def test_a_template_without_an_end_token_marks_the_answer_alone():
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    with_prompt = template.replace("[assistant] ", "{% if add_generation_prompt %}[assistant]{% endif %}")
    (found,) = mask(CONVERSATION[:3], with_prompt)
    marked = [token for token, is_answer in zip(found.tokens, found.answer, strict=True) if is_answer]
    assert embedded().decode(marked) == " A brick is a block of clay."


def test_trimmed_contents_are_found():
    trimmed = CHATML.replace("{{ message['content'] }}", "{{ message['content'] | trim }}")
    spaced = [*CONVERSATION[:2], {"role": "assistant", "content": "  A brick is a block of clay.\n\n"}]
    assert as_pairs(mask(spaced, trimmed)) == [slow_mask(CONVERSATION[:3])]


def test_a_sentencepiece_vocabulary():
    tokenizer = sentencepiece()
    template = "{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello world"}]
    (found,) = mask(messages, template, tokenizer=tokenizer, eos_ids=tokenizer.eos_ids)
    whole = encode_rendered(tokenizer, "hello<end_of_turn>hello world<end_of_turn>")
    start = len(encode_rendered(tokenizer, "hello<end_of_turn>"))
    assert found.tokens == whole
    assert found.answer == [False] * start + [True] * (len(whole) - start)
