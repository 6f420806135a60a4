"""The data sets that are understood: how an entry of each is recognised and which prompt it makes.

Called by `bench.prompts`. Texts are sent as the data has them: no instructions are added, no tests, no answers.
Invariant: an entry becomes a prompt, is left out for a reason that is counted (`Unusable`), or raises one
`PromptError` that names its place and the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

from draftsmith.bench.workloads.files import Entry, kind_of
from draftsmith.bench.workloads.prompt import Prompt
from draftsmith.errors import PromptError

# SPEED-Bench is published without the texts it may not redistribute; its own script fills them in.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
_ID_KEYS = ("question_id", "prompt_id", "task_id", "instance_id", "unique_id", "id")
_USER, _ANSWER, _SYSTEM = "user", "assistant", "system"
# The names that the chat dialects have for the three.
_ROLES = {
    **dict.fromkeys(("user", "human"), _USER),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), _ANSWER),
    **dict.fromkeys(("system", "developer"), _SYSTEM),
}


class Unusable(Exception):
    """An entry that is well formed and holds nothing to ask, as ShareGPT has some; its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an entry says: the user's turns and the system message."""

    turns: tuple[str, ...]
    system: str | None = None


@final
class Fields:
    """The keys of one entry, read with errors that name the place."""

    def __init__(self, entry: Entry) -> None:
        if not isinstance(entry.item, dict):
            raise PromptError(f"{entry.where}: expected a JSON object, found {kind_of(entry.item)}")
        self.entry = entry
        self.item: Mapping[str, Any] = entry.item

    def fail(self, problem: str) -> NoReturn:
        raise PromptError(f"{self.entry.where}: {problem}")

    def text(self, key: str) -> str:
        value = self.item[key]
        if not isinstance(value, str):
            self.fail(f"{key!r} must hold text, found {kind_of(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.item.get(key) is None else self.text(key)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, not empty."""
        value = self.item[key]
        if not isinstance(value, list) or not value:
            self.fail(f"{key!r} must be a non-empty list of texts")
        for number, text in enumerate(value, 1):
            if not isinstance(text, str):
                self.fail(f"{key!r} must hold texts, found {kind_of(text)} at place {number}")
        return tuple(value)

    def objects(self, key: str) -> list[Mapping[str, Any]]:
        """A list of objects."""
        value = self.item[key]
        if not isinstance(value, list):
            self.fail(f"{key!r} must be a list of messages, found {kind_of(value)}")
        for number, item in enumerate(value, 1):
            if not isinstance(item, dict):
                self.fail(f"{key!r} must hold messages, found {kind_of(item)} at place {number}")
        return value


@dataclass(frozen=True, kw_only=True)
class Format:
    """One data set's entries. `marks`: sets of keys, each of which alone tells it from the formats after it.

    `category`: that of its prompts where the data has none of its own (under `category_key`).
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    read: Callable[[Fields], Asked]
    category: str = ""
    category_key: str = "category"

    def fits(self, item: Mapping[str, Any]) -> bool:
        return any(all(key in item for key in keys) for keys in self.marks)


def _single(*keys: str) -> Callable[[Fields], Asked]:
    """A reader of one text, under the first of the keys that is there."""

    def read(fields: Fields) -> Asked:
        return Asked(turns=(fields.text(next(key for key in keys if key in fields.item)),))

    return read


def _turns(fields: Fields) -> Asked:
    return Asked(turns=fields.texts("turns"), system=fields.optional_text("system"))


def _prompt(fields: Fields) -> Asked:
    """One text; or a list of turns, as MT-Bench has them on the hub."""
    several = isinstance(fields.item["prompt"], list)
    turns = fields.texts("prompt") if several else (fields.text("prompt"),)
    return Asked(turns=turns, system=fields.optional_text("system"))


def _mt_bench(fields: Fields) -> Asked:
    return _turns(fields) if "turns" in fields.item else _prompt(fields)


def _messages(fields: Fields) -> Asked:
    said = _said(fields, "messages", ("role",), ("content",))
    if any(role == _SYSTEM for role, _ in said[1:]):
        fields.fail("a system message can only come first in 'messages'")
    asked = _asked(said)
    if not asked.turns:
        fields.fail("no message of the user among 'messages'")
    return asked


def _sharegpt(fields: Fields) -> Asked:
    """The human's turns. The data was collected, not written: what holds no question is left out, not an error."""
    said = _said(fields, "conversations", ("from", "role"), ("value", "content"))
    if any(role == _SYSTEM for role, _ in said[1:]):
        raise Unusable("a system message in the middle")
    asked = _asked([(role, text) for role, text in said if role != _SYSTEM or text.strip()])
    blank = next((number for number, turn in enumerate(asked.turns) if not turn.strip()), len(asked.turns))
    if not blank:
        raise Unusable("nothing the user says" if not asked.turns else "an empty first turn")
    return Asked(turns=asked.turns[:blank], system=asked.system)


def _said(fields: Fields, key: str, role_keys: tuple[str, ...], text_keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """(role, text) of each message."""
    said = []
    for number, message in enumerate(fields.objects(key), 1):
        role = next((message[name] for name in role_keys if name in message), None)
        text = next((message[name] for name in text_keys if name in message), None)
        if not isinstance(role, str) or role.lower() not in _ROLES:
            fields.fail(f"message {number} of {key!r} is by {role!r}; known: {', '.join(_ROLES)}")
        if not isinstance(text, str):
            fields.fail(f"message {number} of {key!r} must hold text, found {kind_of(text)}")
        said.append((_ROLES[role.lower()], text))
    return said


def _asked(said: list[tuple[str, str]]) -> Asked:
    """The user's side: messages with no answer between them are one turn; given answers give way to the engine's."""
    turns: list[str] = []
    before = None
    for role, text in said:
        if role == _USER:
            if before == _USER:
                turns[-1] += f"\n\n{text}"
            else:
                turns.append(text)
        before = role
    return Asked(turns=tuple(turns), system=said[0][1] if said and said[0][0] == _SYSTEM else None)


# In the order of recognition: the first that fits an entry reads it.
FORMATS: tuple[Format, ...] = (
    Format(name="speed-bench", marks=tuple(("turns", key) for key in ("src_id", "sub_category")), read=_turns),
    Format(name="spec-bench", marks=(("turns", "question_id", "category"),), read=_turns),
    Format(name="deepspec", marks=(("turns",),), read=_turns),
    Format(name="sharegpt", marks=(("conversations",),), read=_sharegpt, category="sharegpt"),
    Format(name="messages", marks=(("messages",),), read=_messages),
    Format(name="swe-bench", marks=(("problem_statement",),), read=_single("problem_statement"), category="swe-bench"),
    Format(name="humaneval", marks=(("prompt", "entry_point"),), read=_single("prompt"), category="humaneval"),
    Format(
        name="mbpp",
        marks=(("prompt", "code", "test_list"), ("text", "code", "test_list")),
        read=_single("prompt", "text"),
        category="mbpp",
    ),
    Format(name="gsm8k", marks=(("question", "answer"),), read=_single("question"), category="gsm8k"),
    Format(
        name="math-500",
        marks=(("problem", "solution"), ("problem", "answer")),
        read=_single("problem"),
        category="math-500",
        category_key="subject",
    ),
    # Never recognised by itself: its file looks like Spec-Bench's, which took it over.
    Format(name="mt-bench", marks=(("turns",), ("prompt", "category")), read=_mt_bench),
    Format(name="plain", marks=(("prompt",),), read=_prompt),
)
_BY_NAME = {item.name.replace("-", ""): item for item in FORMATS}


def format_named(name: str) -> Format | None:
    """The format of that name, however it is spelled (`math-500`, `MATH500`), or None."""
    return _BY_NAME.get(name.lower().replace("-", "").replace("_", ""))


def read_entry(entry: Entry, forced: Format | None = None, max_turns: int | None = None) -> tuple[Prompt, Format]:
    """The prompt of an entry and the format it was read as.

    `max_turns`: keep at most so many of its turns. Raises `PromptError`, and `Unusable` for one to leave out.
    """
    fields = Fields(entry)
    chosen = _recognise(fields) if forced is None else forced
    if not chosen.fits(fields.item):
        wanted = " or ".join(" and ".join(map(repr, keys)) for keys in chosen.marks)
        fields.fail(f"not an entry of {chosen.name}, which has {wanted}; its keys: {_keys(fields.item)}")
    asked = chosen.read(fields)
    if any(_PLACEHOLDER in turn for turn in asked.turns):
        fields.fail(
            f"question {_prompt_id(fields)} is a placeholder, not a prompt; fill the file with "
            "SPEED-Bench's own preparation script and give its output"
        )
    category = fields.optional_text(chosen.category_key)
    prompt_id, max_new_tokens = _prompt_id(fields), _max_new_tokens(fields)
    try:
        prompt = Prompt(
            prompt_id=prompt_id,
            turns=asked.turns[:max_turns],
            system=asked.system,
            category=chosen.category if category is None else category,
            max_new_tokens=max_new_tokens,
        )
    except PromptError as error:
        fields.fail(str(error))
    return prompt, chosen


def _recognise(fields: Fields) -> Format:
    chosen = next((item for item in FORMATS if item.name != "mt-bench" and item.fits(fields.item)), None)
    if chosen is None:
        known = "'prompt', 'turns', 'messages', 'conversations', 'problem_statement', 'question' and 'answer'"
        fields.fail(f"of no known format: {known} or 'problem' and 'solution' are not among its keys "
                    f"({_keys(fields.item)})")  # fmt: skip
    return chosen


def _keys(item: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, item)) or "none"


def _prompt_id(fields: Fields) -> str:
    for key in _ID_KEYS:
        value = fields.item.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, str | int):
                fields.fail(f"{key!r} must be text or a whole number, found {kind_of(value)}")
            return str(value)
    return str(fields.entry.number)


def _max_new_tokens(fields: Fields) -> int | None:
    value = fields.item.get("max_new_tokens")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    fields.fail(f"'max_new_tokens' must be a whole number of at least 1, found {value!r}")
