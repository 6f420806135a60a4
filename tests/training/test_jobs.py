"""Jobs run many at once and come out in order."""

from contextlib import closing

import pytest

from draftsmith.training.jobs import Request, in_order
from draftsmith.training.texts import Dropped, Text
from tests.training.fakes import Scribe


def job(number, steps):
    said = []
    for step in range(steps):
        reply = yield Request(messages=[{"role": "user", "content": f"{number}/{step}"}], max_new_tokens=9)
        said.append(reply.text)
    return Text(messages=[], text_id=f"{number}:{''.join(said)}")


def jobs(count):
    return [job(number, number % 4) for number in range(count)]


@pytest.mark.parametrize("at_once", [1, 3, 50])
def test_outcomes_come_in_order_and_do_not_depend_on_how_many_run(at_once):
    alone = [outcome.text_id for outcome in in_order(jobs(30), Scribe(), at_once=1)]
    found = [outcome.text_id for outcome in in_order(jobs(30), Scribe(at_once=at_once), at_once=at_once)]
    assert found == alone
    assert [int(text.split(":")[0]) for text in found] == list(range(30))


def test_a_slow_text_does_not_let_the_others_run_away():
    begun = []

    class Stubborn(Scribe):
        """Never answers the first text while another waits."""

        def wait(self):
            key = max(self.waiting)
            return [(key, self.reply(self.waiting.pop(key)))]

    def source():
        for number in range(1000):
            begun.append(number)
            yield job(number, 1)

    scribe = Stubborn()
    outcomes = in_order(source(), scribe, at_once=4)
    next(outcomes)
    assert len(begun) <= 24 + 4


def test_closing_cancels_what_runs():
    scribe = Scribe()
    with closing(in_order(jobs(30), scribe, at_once=5)) as outcomes:
        next(outcomes)
    assert scribe.cancelled


def test_what_ended_before_its_turn_is_parked_and_not_written_again():
    whole = list(in_order(jobs(30), Scribe(), at_once=1))
    parked = {}
    outcomes = in_order(jobs(30), Scribe(), at_once=6, park=parked.__setitem__)
    begun = [next(outcomes) for _ in range(7)]
    outcomes.close()
    waiting = {number: outcome for number, outcome in parked.items() if number >= 7}
    assert waiting
    scribe = Scribe()
    rest = list(in_order(jobs(30)[7:], scribe, at_once=6, first=7, parked=waiting))
    assert begun + rest == whole
    written = {request.messages[0]["content"].split("/")[0] for request in scribe.requests}
    assert not written & set(map(str, waiting))


def test_all_parked_and_nothing_left_to_write():
    whole = dict(enumerate(in_order(jobs(5), Scribe(), at_once=1)))
    assert list(in_order(jobs(5), Scribe(), at_once=2, parked=whole)) == list(whole.values())
    assert list(in_order([], Scribe(), at_once=2, parked=whole)) == []


def test_no_jobs_no_outcomes():
    assert list(in_order([], Scribe(), at_once=3)) == []


def test_a_dropped_text_is_an_outcome():
    def broken():
        return Dropped(reason="why not")
        yield

    assert next(iter(in_order([broken(), job(1, 1)], Scribe(), at_once=2))) == Dropped(reason="why not")
