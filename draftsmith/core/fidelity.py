"""What an output has to do with what the target would have written, and how that is said.

Every record of an output carries a `Fidelity`: results, events, benchmark arms, audits. Invariant: nothing heavy is
imported here, for the command line and the report ask too.
"""

from __future__ import annotations

import enum


class Fidelity(enum.StrEnum):
    """What an output has to do with what the target would have written."""

    EXACT = "exact"
    """The target's own ids, or drawn from the target's own law."""
    LOSSY = "lossy"
    """Near it, by a rule that was asked for by name."""
    SYNTHETIC = "synthetic"
    """Nothing: drafts were accepted at set rates, whatever they were; only times and counts mean anything."""


def marked(name: str, fidelity: Fidelity) -> str:
    """A name with what is to be known of what it names."""
    return name if fidelity is Fidelity.EXACT else f"{name} ({fidelity.value})"
