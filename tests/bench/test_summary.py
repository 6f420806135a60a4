"""Every figure of summary.json, checked by hand on scripted arms; bundles read back."""

import json

import pytest

from draftsmith.bench import bundle
from draftsmith.bench.bundle import BundleWriter, events_name
from draftsmith.bench.differences import find_differences
from draftsmith.bench.runner import blocks_of, measure, usable_prompts
from draftsmith.bench.runs import Difference, Measured
from draftsmith.bench.summary import summarise_run
from draftsmith.core.stats import EventLog
from draftsmith.errors import OptionError, UserError
from tests.bench.fakes import ScriptedEngine, workload

FIELDS = {
    "drafter", "concurrency", "temperature", "num_prompts", "emitted_tokens", "steps", "tokens_per_step",
    "tokens_per_second", "speedup", "identical_prompts", "divergent_prompts", "seconds",
}  # fmt: skip


def config(drafters, work, failed=()):
    return {
        "model": "fake",
        "backend": "scripted",
        "hardware": {"cores": 2},
        "versions": {"python": "3"},
        "drafters": list(drafters),
        "concurrency": work.concurrency,
        "temperature": 0.0,
        "num_prompts": len(work.prompts),
        "failed_prompts": {str(key): value for key, value in dict(failed).items()},
    }


def measured_run(engines, work, *, seconds=None, stop_after=None, gap=None):
    """Measure all; `seconds`: drafter -> wall seconds per block in place of the clock's."""
    usable, failed = usable_prompts(work, engines["none"])
    runs = []
    for run in measure(engines, work, blocks_of(work, usable)):
        if seconds is not None:
            run = type(run)(
                **{**{name: getattr(run, name) for name in run.__dataclass_fields__}, "seconds": seconds[run.drafter]}
            )
        runs.append(run)
        if stop_after is not None and len(runs) == stop_after:
            break
    differences = {key: Difference(position=place, gap=gap) for key, place in find_differences(runs).items()}
    return Measured(
        config=config(engines, work, failed),
        runs=tuple(runs),
        differences=differences,
        failed=failed,
        interrupted=stop_after is not None,
        other_cores=None if stop_after else 0.125,
    )


@pytest.fixture
def engines():
    return {"none": ScriptedEngine("none"), "ngram": ScriptedEngine("ngram", 4, changes={"b": 5})}


def result_of(summary, drafter):
    return next(item for item in summary["results"] if item["drafter"] == drafter)


def test_the_named_fields_are_there(engines):
    summary = summarise_run(measured_run(engines, workload("abc")))
    assert {"model", "backend", "hardware", "versions", "results"} <= summary.keys()
    for result in summary["results"]:
        assert result.keys() >= FIELDS
        assert result["speedup"].keys() == {"ratio", "ci95"}
        assert len(result["speedup"]["ci95"]) == 2
        assert result["seconds"].keys() == {"draft", "verify", "sample", "other"}
    json.dumps(summary, allow_nan=False)


def test_counts(engines):
    summary = summarise_run(measured_run(engines, workload("abc")))
    none, ngram = summary["results"]
    # 9 tokens a prompt: one from the prompt step, 8 plain steps or 2 steps of 4.
    assert (none["emitted_tokens"], none["steps"], none["tokens_per_step"]) == (27, 24, 1.0)
    assert (ngram["emitted_tokens"], ngram["steps"], ngram["tokens_per_step"]) == (27, 6, 4.0)
    assert (ngram["drafted_tokens"], ngram["accepted_tokens"]) == (18, 18)
    assert (none["identical_prompts"], none["divergent_prompts"]) == (3, 0)
    assert (ngram["identical_prompts"], ngram["divergent_prompts"]) == (2, 1)


def test_rates_are_totals_over_totals_and_parts_sum_to_the_wall_time(engines):
    summary = summarise_run(measured_run(engines, workload("abc"), seconds={"none": 2.0, "ngram": 0.5}))
    none, ngram = summary["results"]
    assert none["tokens_per_second"] == pytest.approx(27 / 6)
    assert ngram["tokens_per_second"] == pytest.approx(27 / 1.5)
    assert ngram["speedup"] == {"ratio": 4.0, "ci95": [4.0, 4.0]}
    assert none["speedup"] == {"ratio": 1.0, "ci95": [1.0, 1.0]}
    for result in (none, ngram):
        assert sum(result["seconds"].values()) == pytest.approx(result["seconds_total"])
    assert none["seconds"]["verify"] == pytest.approx(27 * 0.01)


def test_concurrent_requests_share_steps_but_not_pairs(engines):
    summary = summarise_run(measured_run(engines, workload("abcd", concurrency=4)))
    ngram = result_of(summary, "ngram")
    assert (ngram["steps"], ngram["tokens_per_step"], ngram["concurrency"]) == (8, 4.0, 4)
    assert ngram["seconds"]["verify"] == pytest.approx(3 * 0.01)


def test_failures_are_counted_and_enter_nothing_else():
    engines = {
        "none": ScriptedEngine("none", refuses=frozenset("d")),
        "ngram": ScriptedEngine("ngram", 4, fails_on=frozenset("b")),
    }
    summary = summarise_run(measured_run(engines, workload("abcd"), seconds={"none": 2.0, "ngram": 0.5}))
    none, ngram = summary["results"]
    assert (none["failed_prompts"], none["num_prompts"], none["emitted_tokens"]) == (1, 3, 27)
    assert (ngram["failed_prompts"], ngram["num_prompts"], ngram["emitted_tokens"]) == (2, 2, 18)
    assert ngram["speedup"]["ratio"] == 4.0
    assert ngram["tokens_per_second"] == pytest.approx(18)
    assert ngram["identical_prompts"] + ngram["divergent_prompts"] == 2


def test_an_arm_that_only_failed_has_no_rates(engines):
    engines["ngram"] = ScriptedEngine("ngram", fails_on=frozenset("abc"))
    result = result_of(summarise_run(measured_run(engines, workload("abc"))), "ngram")
    assert (result["num_prompts"], result["failed_prompts"]) == (0, 3)
    assert result["tokens_per_step"] is None
    assert result["tokens_per_second"] is None
    assert result["speedup"] == {"ratio": None, "ci95": [None, None]}


def test_categories_only_where_the_data_have_them(engines):
    summary = summarise_run(measured_run(engines, workload("abc", categories=["x", "y", "x"])))
    categories = result_of(summary, "ngram")["categories"]
    assert {name: item["num_prompts"] for name, item in categories.items()} == {"x": 2, "y": 1}
    assert categories["y"]["divergent_prompts"] == 1
    assert categories["x"]["divergent_prompts"] == 0
    assert "categories" not in summarise_run(measured_run(engines, workload("abc")))["results"][0]


def test_an_interrupted_block_is_left_out_for_every_arm(engines):
    summary = summarise_run(measured_run(engines, workload("abc"), stop_after=3))
    assert summary["interrupted"]
    assert (summary["prompts_measured"], summary["prompts_given"]) == (1, 3)
    assert [item["num_prompts"] for item in summary["results"]] == [1, 1]


def test_near_ties_are_told_apart(engines):
    def near(gap):
        return result_of(summarise_run(measured_run(engines, workload("abc"), gap=gap)), "ngram")["near_ties"]

    assert (near(5e-5), near(2e-4), near(None)) == (1, 0, 0)


class TestBundle:
    """A run on disk."""

    def write(self, measured, work, path, **options):
        writer = BundleWriter(path, force=options.get("force", False))
        writer.begin(measured.config, work.prompts)
        for run in measured.runs:
            writer.add(run)
        writer.end(measured, summarise_run(measured))

    def test_it_reads_back_to_the_same_figures(self, engines, tmp_path):
        work = workload("abcdef", categories=["x"] * 3 + ["y"] * 3, concurrency=2)
        measured = measured_run(engines, work, gap=3e-5)
        self.write(measured, work, tmp_path / "out")
        again = bundle.read(tmp_path / "out")
        assert again == measured
        assert summarise_run(again) == json.loads((tmp_path / "out" / "summary.json").read_text())

    def test_event_logs_are_readable_by_the_statistics_alone(self, engines, tmp_path):
        work = workload("abc")
        measured = measured_run(engines, work)
        self.write(measured, work, tmp_path / "out")
        log = EventLog.load(tmp_path / "out" / events_name(["none", "ngram"], "ngram"))
        assert sum(record.emitted for record in log.requests) == 27

    def test_outputs_name_the_first_difference(self, engines, tmp_path):
        work = workload("abc")
        self.write(measured_run(engines, work, gap=3e-5), work, tmp_path / "out")
        records = [json.loads(line) for line in (tmp_path / "out" / "outputs.jsonl").read_text().splitlines()]
        places = {(item["drafter"], item["prompt_id"]): item["first_difference"] for item in records}
        assert places["ngram", "id1"] == {"position": 5, "gap": 3e-5}
        assert {value for key, value in places.items() if key != ("ngram", "id1")} == {None}

    def test_a_run_that_died_is_readable_up_to_there(self, engines, tmp_path):
        work = workload("abc")
        measured = measured_run(engines, work, stop_after=4)
        writer = BundleWriter(tmp_path / "out", force=False)
        writer.begin(measured.config, work.prompts)
        for run in measured.runs:
            writer.add(run)
        with (tmp_path / "out" / "runs.jsonl").open("a") as stream:
            stream.write('{"block": 2, "dra')
        again = bundle.read(tmp_path / "out")
        assert again.interrupted
        assert again.runs == measured.runs

    def test_an_old_bundle_is_kept_unless_forced(self, engines, tmp_path):
        work = workload("abc")
        measured = measured_run(engines, work)
        self.write(measured, work, tmp_path / "out")
        with pytest.raises(OptionError, match="--force"):
            BundleWriter(tmp_path / "out", force=False)
        smaller = workload("a")
        self.write(measured_run({"none": ScriptedEngine("none")}, smaller), smaller, tmp_path / "out", force=True)
        assert not (tmp_path / "out" / events_name(["none", "ngram"], "ngram")).exists()
        assert len(bundle.read(tmp_path / "out").runs) == 1

    def test_selections_become_file_names(self):
        names = ["none", "ngram:max_ngram=4", "draft_model:model=../x", "draft_model:model=..:x"]
        files = [events_name(names, name) for name in names]
        assert files[:2] == ["events-0-none.jsonl", "events-1-ngram+max_ngram=4.jsonl"]
        assert not any("/" in file for file in files)
        assert len(set(files)) == 4

    def test_what_is_no_bundle_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="bundle"):
            bundle.read(tmp_path)
