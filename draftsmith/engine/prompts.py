"""From what a caller hands in to token ids.

Called by the engine for every request. Invariant: the ids returned are inside the vocabulary, not empty,
and leave room for at least one token in the target's context.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Series
from typing import Any

from draftsmith.engine.loading import LoadedModel
from draftsmith.engine.params import Prompt
from draftsmith.errors import PromptError


def is_batch(prompt: Prompt | Series[Prompt]) -> bool:
    """Whether this is a list of prompts rather than one (strings, or lists of messages or of ids)."""
    if isinstance(prompt, str) or not isinstance(prompt, Series) or not prompt:
        return False  # one prompt, or none at all, which `encode_prompt` refuses
    return not isinstance(prompt[0], Mapping | int)


def encode_prompt(prompt: Any, model: LoadedModel) -> list[int]:
    """Token ids of one prompt: a raw string, chat messages, or ids. Raises `PromptError`."""
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty; give at least one character")
        ids = _with_bos(_encode(prompt, model), model)
    elif _is_list(prompt) and all(isinstance(item, Mapping) for item in prompt):
        if model.chat is None:
            raise PromptError(f"{model.name} has no chat template; give a raw string (--raw)")
        ids = _encode(model.chat.render(prompt, add_generation_prompt=True), model)
        if ids and ids[0] != model.tokenizer.bos_id:
            ids = _with_bos(ids, model)
    elif _is_list(prompt) and all(type(item) is int for item in prompt):
        ids = list(prompt)
    else:
        raise PromptError("a prompt is a string, a list of role/content messages, or a list of token ids, not empty")
    if not ids:
        raise PromptError("the prompt has no tokens")
    limit = model.backend.spec.max_context
    if len(ids) >= limit:
        raise PromptError(f"the prompt has {len(ids)} tokens; {model.name} takes at most {limit - 1}; shorten it")
    vocab_size = model.backend.spec.vocab_size
    if not 0 <= min(ids) <= max(ids) < vocab_size:  # text too: a tokenizer may know more tokens than its model
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise PromptError(f"token id {token} is outside the vocabulary of {model.name} (0 to {vocab_size - 1})")
    return ids


def _is_list(prompt: Any) -> bool:
    return isinstance(prompt, Series) and not isinstance(prompt, bytes | bytearray | memoryview) and len(prompt) > 0


def _encode(text: str, model: LoadedModel) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start + 1} of the prompt is half of a surrogate pair and not text; remove it"
        ) from error
    return model.tokenizer.encode(text, special=True)


def _with_bos(ids: list[int], model: LoadedModel) -> list[int]:
    tokenizer = model.tokenizer
    return [tokenizer.bos_id, *ids] if tokenizer.add_bos and tokenizer.bos_id is not None else ids
