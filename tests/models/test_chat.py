"""Chat templates render as transformers renders them, and refuse what cannot be rendered."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from draftsmith.errors import ModelFileError, PromptError
from draftsmith.io.files import open_model
from draftsmith.models.chat import ChatTemplate
from draftsmith.models.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <b>hé</b> & 'quote' \"it\"\n"},
    {"role": "assistant", "content": "  hé  "},
    {"role": "user", "content": "{{ not.a.template }} {% nor this %}"},
]
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "blocks": """{%- if messages[0].role == 'system' %}
    {{- '<sys>' + messages[0].content + '</sys>' }}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{% for message in rest %}
    {% if loop.first %}
first:
    {% endif %}
{{ message.content }}
    {% if not loop.last %}{{ '|' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}go{% endif %}
""",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{% if tools %}tools{% else %}none{% endif %}",
    "namespace": """{% set state = namespace(count=0, last='') %}
{% for m in messages %}{% set state.count = state.count + 1 %}{% set state.last = m.role %}{% endfor %}
{{ state.count }} {{ state.last }} {{ documents is none }}""",
    "loops": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }};{% if m.role ==
 'assistant' %}{% break %}{% endif %}{% endfor %}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{% set inside = m.content %}{{ inside }}
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ inside is defined }}""",
    "scope": "{% generation %}{% set inside = 1 %}{{ inside }}{% endgeneration %}{{ inside is defined }}",
    "macro": "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ messages | length }}",
}


def theirs(template, messages, add_generation_prompt, special=SPECIAL):
    [text], _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=add_generation_prompt, **special
    )
    return text


class TestEqualsTransformers:
    @pytest.mark.parametrize("name", TEMPLATES)
    @pytest.mark.parametrize("prompt", [True, False])
    def test_features(self, name, prompt):
        ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(CONVERSATION, prompt)
        assert ours == theirs(TEMPLATES[name], CONVERSATION, prompt)

    @given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4), prompt=st.booleans())
    def test_any_text(self, texts, prompt):
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        ours = ChatTemplate(TEMPLATES["blocks"], SPECIAL).render(messages, prompt)
        assert ours == theirs(TEMPLATES["blocks"], messages, prompt)

    def test_smollm2(self):
        files = open_model("smollm2")
        special = Tokenizer.from_data(files.tokenizer).special_tokens
        chat = ChatTemplate(files.chat_template, special)
        for messages in (CONVERSATION, CONVERSATION[1:]):
            assert chat.render(messages) == theirs(files.chat_template, messages, True, special)
        assert chat.render([{"role": "user", "content": "Hi"}]).endswith(
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )


class TestMessages:
    chat = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", SPECIAL)

    def test_text_parts_are_joined(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert self.chat.render([{"role": "user", "content": parts}]) == "user:ab;"

    def test_an_absent_value_is_no_value(self):
        template = ChatTemplate("{{ messages[0].name is defined }}", SPECIAL)
        assert template.render([{"role": "user", "content": "x", "name": None}]) == "False"

    def test_a_call_needs_no_content(self):
        message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
        assert ChatTemplate("{{ messages[0].tool_calls[0].name }}", {}).render([message]) == "f"

    def test_the_callers_messages_stay_as_they_were(self):
        messages = [{"role": "user", "content": "x", "name": None}]
        self.chat.render(messages)
        assert messages == [{"role": "user", "content": "x", "name": None}]

    @pytest.mark.parametrize(
        ("messages", "pattern"),
        [
            ([], "non-empty list"),
            ("hi", "non-empty list"),
            (None, "non-empty list"),
            ({"role": "user", "content": "x"}, "non-empty list"),
            (["hi"], "message 1 is str"),
            (
                [{"role": "user", "content": "x"}, {"role": "bot", "content": "x"}],
                "message 2 has the role 'bot'; known: sys",
            ),
            ([{"content": "x"}], "message 1 has the role None"),
            ([{"role": ["user"], "content": "x"}], "message 1 has the role"),
            ([{"role": "user"}], r"message 1 \(user\) has no content"),
            ([{"role": "user", "content": None}], "has no content"),
            ([{"role": "user", "content": 3}], "content of message 1 is int"),
            ([{"role": "user", "content": "x", "rol": "y"}], "unknown key 'rol'; known: role"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'; only text"),
            ([{"role": "user", "content": ["x"]}], "part of type 'str'"),
            ([{"role": "tool", "content": "x", "tool_calls": {1, 2}}], "message 1 holds a value that is no plain data"),
        ],
    )
    def test_malformed_messages(self, messages, pattern):
        with pytest.raises(PromptError, match=pattern) as caught:
            self.chat.render(messages)
        assert "\n" not in str(caught.value)


class TestRefusals:
    def test_no_template(self):
        with pytest.raises(PromptError, match=r"no chat template.*--raw"):
            ChatTemplate(None, SPECIAL).render(CONVERSATION)

    @pytest.mark.parametrize("template", ["{% if %}", "{{ ", "{% unknown %}", "{% generation %}", "{{ x | nofilter }}"])
    def test_a_template_that_is_not_jinja(self, template):
        with pytest.raises(ModelFileError, match="not valid Jinja"):
            ChatTemplate(template, SPECIAL)

    @pytest.mark.parametrize(
        ("template", "pattern"),
        [
            ("{{ raise_exception('roles must\nalternate') }}", "refuses these messages: roles must alternate$"),
            ("{{ nothing.at.all }}", "undefined"),
            ("{{ messages[0].content + 1 }}", "refuses"),
            ("{{ 1 // 0 }}", "refuses"),
            ("{{ messages.append(1) }}", "not safely|unsafe|refuses"),
            ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
            ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses"),
        ],
    )
    def test_a_template_that_fails_or_tries_to_break_out(self, template, pattern):
        with pytest.raises(PromptError, match=re.compile(pattern)) as caught:
            ChatTemplate(template, SPECIAL).render(CONVERSATION)
        assert "\n" not in str(caught.value)
