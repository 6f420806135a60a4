"""Typed reads from a config of unknown origin.

Called by `spec`. Invariant: whatever JSON a file holds, a read gives a value of the asked-for type or
raises `ModelFileError` (one line that names the key and what was there).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.errors import ModelFileError


class Keys:
    """The keys of one JSON object, over defaults for the absent ones. `what` opens error messages."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], what: str) -> None:
        self._values = values
        self._defaults = defaults
        self._what = what

    def get(self, key: str) -> Any:
        """The value as it is, None when absent."""
        return self._values[key] if key in self._values else self._defaults.get(key)

    def integer(self, key: str) -> int:
        """A whole number >= 1."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(key, value, "a whole number >= 1")
        return value

    def number(self, key: str) -> float:
        """A finite number > 0."""
        value = self._needed(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self._error(key, value, "a number > 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; absent and null are false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._error(key, value, "true or false")
        return bool(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self._needed(key)
        if not isinstance(value, str):
            raise self._error(key, value, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._needed(key)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._error(key, value, "a list of strings")
        return list(value)

    def object(self, key: str) -> dict[str, Any]:
        """A JSON object; absent and null are empty."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._error(key, value, "an object")
        return dict(value)

    def _needed(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"{self._what} lacks the key {key!r}")
        return value

    def _error(self, key: str, value: Any, needed: str) -> ModelFileError:
        return ModelFileError(f"{self._what}: key {key!r} is {value!r}; {needed} is needed")
