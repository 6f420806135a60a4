"""Drives an arm as the runner does, and holds it to its contract while it does."""

from time import perf_counter

from draftsmith.bench.arms import Answer, Arm, Arrival, Ask

PATIENCE = 20.0
"""Seconds after which an arm counts as hanging."""


def ask(key=0, ids=(5, 6, 7), *, n=4, end_ids=(2,), messages=None, text="", **sampling):
    return Ask(
        key=key,
        ids=ids,
        messages=messages,
        text=text,
        max_new_tokens=n,
        end_ids=frozenset(end_ids),
        **sampling,
    )


def run(arm: Arm, *asks: Ask) -> dict[int, tuple[Answer, list[Arrival]]]:
    """Submit all, poll until each is answered; the answer and the arrivals of each."""
    began = perf_counter()
    for one in asks:
        arm.submit(one)
    assert perf_counter() - began < 1, "submit waits"
    answers: dict[int, Answer] = {}
    arrivals: dict[int, list[Arrival]] = {one.key: [] for one in asks}
    while len(answers) < len(asks):
        assert perf_counter() - began < PATIENCE, f"no end; so far {answers}"
        for item in arm.poll(0.2):
            assert item.key not in answers, "something came after the answer"
            assert began <= item.seconds <= perf_counter()
            if isinstance(item, Arrival):
                assert item.num_tokens > 0
                arrivals[item.key].append(item)
            else:
                answers[item.key] = item
    for key, answer in answers.items():
        if answer.error is None:
            assert sum(item.num_tokens for item in arrivals[key]) == answer.num_tokens
            assert answer.token_ids is None or len(answer.token_ids) == answer.num_tokens
        else:
            assert "\n" not in answer.error and "Traceback" not in answer.error
    return {key: (answer, arrivals[key]) for key, answer in answers.items()}


def run_one(arm: Arm, one: Ask) -> tuple[Answer, list[Arrival]]:
    return run(arm, one)[one.key]


def error_of(arm: Arm, one: Ask) -> str:
    answer, _ = run_one(arm, one)
    assert answer.error is not None
    return answer.error
