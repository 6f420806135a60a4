"""Raw texts: conversations with the target's own answers, one JSON object a line.

Written by `training.text_store`, read by `training.prepare`. Files of other origin with `messages` are read too.
Invariant: a text that was read has an answer to learn from, and its messages are plain roles and contents;
a line that is wrong is one `DataError` that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import DataError
from draftsmith.models.chat import ROLES

SHARDS = "texts-*.jsonl"
_OWN_KEYS = frozenset({"number", "id", "messages", "finish_reason", "temperature", "seed", "answer_tokens"})


@dataclass(frozen=True, kw_only=True)
class Text:
    """One conversation. `finish_reason`: of its last answer; "length" says that it was cut.

    `details`: what else is known of it (its kind, tokens written), kept in the file and not needed again.
    """

    messages: Sequence[Mapping[str, str]]
    text_id: str = ""
    finish_reason: str = "stop"
    temperature: float = 0.0
    seed: int = 0
    answer_tokens: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A line of a shard."""
        return {
            "id": self.text_id,
            "messages": [dict(message) for message in self.messages],
            "finish_reason": self.finish_reason,
            "temperature": self.temperature,
            "seed": self.seed,
            "answer_tokens": self.answer_tokens,
            **self.details,
        }

    def said_by(self, role: str) -> list[str]:
        """What one side says, in order."""
        return [message["content"] for message in self.messages if message["role"] == role]


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A text that is not kept, and why: a few words, perhaps a colon and particulars. `sample`: how it began."""

    reason: str
    text_id: str = ""
    sample: str = ""

    def as_json(self) -> dict[str, Any]:
        """A line of what was dropped."""
        return {"id": self.text_id, "reason": self.reason, "sample": self.sample}


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The files of raw texts among files and directories, sorted within each. Raises `DataError` for none."""
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files = sorted(path.glob(SHARDS)) or sorted(path.glob("*.jsonl"))
            if not files:
                raise DataError(f"{path} holds no raw texts (files *.jsonl); make some by `draftsmith data synth`")
            found += files
        elif path.exists():
            found.append(path)
        else:
            raise DataError(
                f"{path} does not exist; name raw texts, a file or the directory of `draftsmith data synth`"
            )
    return found


def read_texts(path: Path) -> Iterator[Text]:
    """The texts of a file. A last line without its end, as a killed writer leaves one, is left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (line.endswith(b"\n") or _is_whole(line)):
                    yield text_of(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def text_of(line: bytes, where: str) -> Text:
    """The text of a line. Raises `DataError`."""
    return text_from(json_of(line, where), where)


def json_of(line: bytes, where: str) -> Any:
    """What a line says. Raises `DataError`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error


def text_from(item: Any, where: str) -> Text:
    """The text of a line's object. Raises `DataError`."""
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected an object with 'messages'")
    messages = item.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: 'messages' must be a non-empty list of role/content messages")
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise DataError(f"{where}: message {number} must have a role ({', '.join(ROLES)}) and a text as content")
        if not _is_text(content):
            raise DataError(f"{where}: message {number} holds half a character (an unpaired surrogate)")
    for key, kinds in (("temperature", (int, float)), ("seed", (int,)), ("answer_tokens", (int,))):
        value = item.get(key, 0)
        # JSON spells numbers that nothing can count with: NaN, and some of thousands of digits.
        if type(value) not in kinds or not abs(value) < 2**64 or (key == "answer_tokens" and value < 0):
            raise DataError(f"{where}: {key!r} must be a number, found {value!r:.40}")
    finish_reason = item.get("finish_reason", "stop")
    if finish_reason not in ("stop", "length"):
        raise DataError(f"{where}: 'finish_reason' must be 'stop' or 'length', found {finish_reason!r:.40}")
    return Text(
        messages=[{"role": message["role"], "content": message["content"]} for message in messages],
        text_id=str(item.get("id", "")),
        finish_reason=finish_reason,
        temperature=float(item.get("temperature", 0.0)),
        seed=item.get("seed", 0),
        answer_tokens=item.get("answer_tokens", 0),
        details={key: value for key, value in item.items() if key not in _OWN_KEYS},
    )


def dropped_from(item: Mapping[str, Any], where: str) -> Dropped:
    """What a line says of a text that was dropped. Raises `DataError`."""
    said = {key: item.get(key, "") for key in ("reason", "id", "sample")}
    for key, value in said.items():
        if not isinstance(value, str):
            raise DataError(f"{where}: {key!r} must be text, found {value!r:.40}")
    return Dropped(reason=said["reason"], text_id=said["id"], sample=said["sample"])


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
