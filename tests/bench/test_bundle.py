"""Bundles on disk: whole, cut off, damaged, with and without Parquet."""

import json

import pytest

from draftsmith.bench import bundle, tables
from draftsmith.bench.bundle import BundleWriter
from draftsmith.bench.summary import summarise_run
from draftsmith.core.stats import RequestStepRecord
from draftsmith.errors import OptionError, UserError
from tests.bench.fakes import ScriptedArm, measured_run, workload


@pytest.fixture
def arms():
    return {
        "none": ScriptedArm("none"),
        "ngram": ScriptedArm("ngram", 4, changes={"b": 5}, fails_on=frozenset("f")),
        "other": ScriptedArm("other", 2, logs=False, counts=True),
    }


@pytest.fixture(params=["parquet", "lines"])
def storage(request, monkeypatch):
    if request.param == "lines":
        monkeypatch.setattr(tables, "has_parquet", lambda: False)
    elif not tables.has_parquet():
        pytest.skip("pyarrow is not installed")
    return request.param


def begin(measured, work, path, *, force=False):
    writer = BundleWriter(path, force=force)
    writer.begin(measured.config, work.prompts)
    for run in measured.runs:
        writer.add(run)
    return writer


def write(measured, work, path, **options):
    begin(measured, work, path, **options).end(measured, summarise_run(measured))


def test_it_reads_back_to_what_was_measured(arms, tmp_path, storage):
    work = workload("abcdef", categories=["x"] * 3 + ["y"] * 3, concurrency=2)
    measured = measured_run(arms, work, gap=3e-5, repeats=2)
    write(measured, work, tmp_path / "out")
    again = bundle.read(tmp_path / "out")
    assert again == measured
    assert json.loads(json.dumps(summarise_run(again))) == bundle.read_summary(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    ending = ".parquet" if storage == "parquet" else ".jsonl"
    assert names == {
        "config.json", "prompts.jsonl", "runs.jsonl", "outputs.jsonl", "summary.json", f"steps{ending}",
        f"request_steps{ending}",
    }  # fmt: skip


def test_the_event_log_is_a_table_others_can_read(arms, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    work = workload("abc")
    measured = measured_run(arms, work)
    write(measured, work, tmp_path / "out")
    table = parquet.read_table(tmp_path / "out" / "request_steps.parquet")
    assert table.column_names == ["run", *RequestStepRecord._fields]
    assert sum(table.column("emitted").to_pylist()) == 2 * 27
    assert table.schema.field("prompt").type == "bool"


def test_outputs_name_the_first_difference(arms, tmp_path):
    work = workload("abc")
    write(measured_run(arms, work, gap=3e-5), work, tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "outputs.jsonl").read_text().splitlines()]
    places = {(item["arm"], item["prompt_id"]): item["first_difference"] for item in records}
    assert places["ngram", "id1"] == {"position": 5, "gap": 3e-5}
    assert {value for key, value in places.items() if key != ("ngram", "id1")} == {None}


@pytest.mark.filterwarnings("ignore:.*cut off")
@pytest.mark.parametrize("half", ["", '{"repeat": 0, "bl', "{"])
def test_a_run_that_died_is_readable_up_to_there(arms, tmp_path, half):
    work = workload("abc")
    measured = measured_run(arms, work, stop_after=5)
    begin(measured, work, tmp_path / "out")
    with (tmp_path / "out" / "journal.jsonl").open("a") as stream:
        stream.write(half)
    again = bundle.read(tmp_path / "out")
    assert again.interrupted
    assert again.runs == measured.runs
    assert [key.prompt for key in again.differences] == [key.prompt for key in measured.differences]
    with pytest.raises(UserError, match="not a finished bundle"):
        bundle.read_summary(tmp_path / "out")


def test_a_run_that_died_while_its_files_were_written_is_read_from_the_journal(arms, tmp_path, monkeypatch):
    work = workload("abc")
    measured = measured_run(arms, work)
    writer = begin(measured, work, tmp_path / "out")

    def die(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "write_table", die)
    with pytest.raises(OSError, match="space"):
        writer.end(measured, summarise_run(measured))
    assert bundle.read(tmp_path / "out").runs == measured.runs


def test_an_old_bundle_is_kept_unless_forced(arms, tmp_path):
    work = workload("abc")
    write(measured_run(arms, work), work, tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(OptionError, match="--force"):
        BundleWriter(tmp_path / "out", force=False)
    smaller = workload("a")
    write(measured_run({"none": ScriptedArm("none")}, smaller), smaller, tmp_path / "out", force=True)
    assert len(bundle.read(tmp_path / "out").runs) == 1
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "name", ["config.json", "runs.jsonl", "outputs.jsonl", "summary.json", "steps", "request_steps"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise"])
def test_a_damaged_bundle_is_one_clear_error(arms, tmp_path, name, damage):
    work = workload("abc")
    write(measured_run(arms, work), work, tmp_path / "out")
    (path,) = (tmp_path / "out").glob(f"{name}*") if "." not in name else [tmp_path / "out" / name]
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "noise": b"\x00\xff[{" + content}[damage])
    with pytest.raises(UserError) as caught:
        bundle.read(tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_what_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(UserError, match="bundle"):
        bundle.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="bundle"):
        bundle.read(tmp_path)
    with pytest.raises(OptionError, match="other files"):
        BundleWriter(tmp_path, force=True)
