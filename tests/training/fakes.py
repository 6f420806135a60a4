"""What training tests share: a fake writer of answers, and a target that needs no weights."""

import hashlib

from draftsmith.models.chat import ChatTemplate
from draftsmith.training.jobs import Reply
from tests.models.vocabularies import embedded

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "river stone cloud engine paper green seven house winter music apple garden silver letter window".split()


def chat(template=CHATML):
    return ChatTemplate(template, embedded().special_tokens)


class Scribe:
    """Answers what it is asked as a function of the request alone; the last ones asked are answered first."""

    def __init__(self, *, at_once=10**9, error=None, cut=()):
        self.waiting = {}
        self.requests = []
        self.at_once = at_once
        self.cancelled = False
        self._error = error
        self._cut = set(cut)

    def submit(self, key, request):
        assert key not in self.waiting
        self.waiting[key] = request
        self.requests.append(request)
        assert len(self.waiting) <= self.at_once

    def wait(self):
        key, request = self.waiting.popitem()
        return [(key, self.reply(request))]

    def cancel(self):
        self.cancelled = True

    def reply(self, request):
        if self._error:
            return Reply(error=self._error)
        said = f"{request.ids}{request.messages}{request.temperature and request.seed}"
        digest = hashlib.sha256(said.encode()).digest()
        text = " " + " ".join(WORDS[byte % len(WORDS)] for byte in digest[: 8 + digest[0] % 20]) + "."
        ids = embedded().encode(text, special=False)
        reason = "length" if digest[1] % 7 in self._cut else "stop"
        return Reply(text=text, finish_reason=reason, num_tokens=len(ids), token_ids=ids)
