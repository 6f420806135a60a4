"""Two runs side by side; above all: what is noise is called noise."""

import numpy as np
import pytest

from draftsmith.bench.compare import compare
from draftsmith.bench.summary import summarise_run
from draftsmith.errors import UserError
from tests.bench.fakes import ScriptedArm, measured_run, with_seconds, workload

TEXTS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def base():
    return measured_run({"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 3)}, workload(TEXTS))


def redrawn(measured, generator, *, machine=1.0, faster=1.0, noise=0.08):
    """The same run with other wall times: long and short prompts, noise on each, a machine of another speed."""
    length = np.random.default_rng(1).lognormal(0.0, 0.7, len(TEXTS))

    def seconds(run):
        drawn = length[run.block] * machine * generator.lognormal(0.0, noise)
        return float(drawn if run.arm == "none" else drawn / 2.0 / faster)

    return type(measured)(
        **{
            **{name: getattr(measured, name) for name in measured.__dataclass_fields__},
            "runs": tuple(with_seconds(run, seconds(run)) for run in measured.runs),
        }
    )


def result_of(found, arm):
    return next(item for item in found["results"] if item["arm"] == arm)


def test_the_same_run_twice_is_called_noise_in_935_of_1000_replays(base):
    """At the 95 % level. A true level of 95 % falls below 935 of 1,000 with probability 0.02; of 93 %, with 0.71."""
    quiet = 0
    for seed in range(1000):
        generator = np.random.default_rng(seed)
        first = redrawn(base, generator)
        second = redrawn(base, generator, machine=float(generator.lognormal(0.0, 0.2)))
        quiet += result_of(compare(first, second, resamples=1000), "ngram")["is_noise"]
    assert quiet >= 935


def test_a_difference_is_found_though_the_machine_was_slower(base):
    found = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        first, second = redrawn(base, generator), redrawn(base, generator, machine=1.3, faster=1.15)
        item = result_of(compare(first, second, resamples=1000), "ngram")
        found += not item["is_noise"] and item["speedup"]["ratio"] > 1
        assert item["speed"]["ratio"] < 1
    assert found >= 90


def test_a_run_beside_itself_has_a_ratio_of_one_and_a_point_for_an_interval(base):
    found = compare(base, base)
    for item in found["results"]:
        assert item["speed"] == {"ratio": 1.0, "low": 1.0, "high": 1.0, "is_noise": True}
        assert item["identical"] == {"same": 26, "of": 26}
    assert (found["settings"], found["versions"], found["hardware"]) == ({}, {}, {})


def test_what_was_set_differently_and_what_came_out_differently_is_said():
    work = workload("abc")
    first = measured_run({"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 2)}, work)
    changed = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 4, changes={"b": 2})}
    second = measured_run(changed, work, temperature=0.5, versions={"python": "4"})
    found = compare(first, second)
    assert found["settings"] == {"temperature": [0.0, 0.5]}
    assert found["versions"] == {"python": ["3", "4"]}
    item = result_of(found, "ngram")
    assert item["tokens_per_step"] == [2.0, 4.0]
    assert item["identical"] == {"same": 2, "of": 3}


def test_only_what_both_runs_hold_is_compared():
    first = measured_run({"none": ScriptedArm("none"), "a": ScriptedArm("a")}, workload("abcd"))
    second = measured_run(
        {"none": ScriptedArm("none", fails_on=frozenset("c")), "b": ScriptedArm("b")}, workload("abcd")
    )
    found = compare(first, second)
    assert [item["arm"] for item in found["results"]] == ["none"]
    assert (found["only_in_first"], found["only_in_second"], found["items"]) == (["a"], ["b"], 3)


def test_prompts_are_paired_by_what_they_are():
    arms = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 2)}
    first, second = measured_run(arms, workload("abcd")), measured_run(arms, workload("dxbc"))
    found = compare(first, second, prompts=("abcd", "dxbc"))
    assert found["items"] == 3
    assert [item["identical"] for item in found["results"]] == [{"same": 3, "of": 3}] * 2
    with pytest.raises(UserError, match="no prompt in common"):
        compare(first, second, prompts=("abcd", "efgh"))


def test_one_block_tells_nothing_of_noise():
    """Its interval is a point: it was called faster or slower, whichever way the wind blew."""
    arms = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 2)}
    first = measured_run(arms, workload("a"))
    found = compare(first, measured_run(arms, workload("a")))
    assert [item["is_noise"] for item in found["results"]] == [None, None]


def test_answers_without_tokens_have_no_speed():
    arms = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 2)}
    first = measured_run(arms, workload("ab"), seconds=lambda *_: 0.0)
    found = compare(first, first)
    assert [(item["speed"], item["speedup"], item["is_noise"]) for item in found["results"]] == [(None,) * 3] * 2
    assert summarise_run(first)["results"][1]["speedup"]["ratio"] is None


def test_runs_with_nothing_in_common_are_refused():
    first, second = (measured_run({name: ScriptedArm(name)}, workload("ab")) for name in ("x", "y"))
    with pytest.raises(UserError, match="no arm"):
        compare(first, second)
    failed = measured_run({"x": ScriptedArm("x", fails_on=frozenset("ab"))}, workload("ab"))
    with pytest.raises(UserError, match="no block"):
        compare(first, failed)


def test_the_interval_of_a_speedup_covers_the_truth_as_often_as_it_says():
    """13 blocks, one per category, as in a short run: 95 % within (0.93, 0.97) of 1,000."""
    arms = {"none": ScriptedArm("none"), "ngram": ScriptedArm("ngram", 3)}
    measured = measured_run(arms, workload(TEXTS[:13]))
    covered = 0
    for seed in range(300):
        drawn = redrawn(measured, np.random.default_rng(seed))
        speedup = summarise_run(drawn)["results"][1]["speedup"]
        covered += speedup["low"] <= 2.0 <= speedup["high"]
    assert covered >= 0.91 * 300
