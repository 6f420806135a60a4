"""Every error a user can meet, in one tree.

DraftsmithError
├── UserError (also a ValueError): what was given, what is allowed, what to do
│   ├── ModelFileError       a model file is missing, truncated, of a wrong magic or type, or lacks a key
│   ├── UnsupportedError     a known thing this version does not do (architecture, field), refused by name
│   ├── OptionError          an option or request field outside its allowed values
│   ├── PromptError          empty prompt, prompt longer than the context, unreadable prompts file
│   ├── DataError            training texts or a prepared corpus are missing, damaged or of another target
│   ├── VocabularyError      drafter and target do not share what they must share
│   └── UnsoundError         a combination of drafter, rule or controller that would change the output law
└── CapacityError            the memory budget cannot hold what was asked for

The command line prints the message of a `DraftsmithError` as one line and exits with code 2.
Internal invariants are `assert`s, not errors of this tree.
"""


class DraftsmithError(Exception):
    """Base of all errors raised on purpose."""


class UserError(DraftsmithError, ValueError):
    """The caller asked for something that cannot be done as asked."""


class ModelFileError(UserError):
    """A model file cannot be read."""


class UnsupportedError(UserError):
    """A known feature or architecture that is refused by name."""


class OptionError(UserError):
    """An option has a value outside its allowed range, or is unknown."""


class PromptError(UserError):
    """A prompt, or a file of prompts, cannot be used."""


class DataError(UserError):
    """Training texts, or a corpus prepared of them, cannot be used."""


class VocabularyError(UserError):
    """Drafter and target vocabularies do not fit."""


class UnsoundError(UserError):
    """A combination that would change the target's output law."""


class CapacityError(DraftsmithError):
    """The memory budget cannot hold the request."""
