"""`auto` stands for the best drafter there is, and what is told is the drafter it stands for."""

import pytest

from draftsmith.drafters.suffix import SuffixDrafter
from draftsmith.errors import OptionError
from tests.engine.fakes import tiny_engine

PROMPT = [5, 9, 2, 5, 9, 2, 7, 5, 9]


def test_auto_is_told_as_the_drafter_it_stands_for():
    engine = tiny_engine(drafter="auto")
    assert engine.drafter_name == "suffix"
    assert isinstance(engine.drafter("auto"), SuffixDrafter)
    assert engine.drafter("auto") is engine.drafter("suffix")
    engine.generate(PROMPT, max_new_tokens=8)
    result = engine.generate(PROMPT, max_new_tokens=8, drafter="auto")
    assert result.statistics.drafter == "suffix"
    assert {row.drafter for row in engine.take_events().requests} == {"suffix"}


def test_auto_takes_no_options():
    with pytest.raises(OptionError, match="auto:path=x: unknown option 'path'"):
        tiny_engine(drafter="auto:path=x")
