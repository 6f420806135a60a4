"""Bundles on disk: whole, cut off, damaged, with and without Parquet."""

import json
import os
import random
from pathlib import Path

import pytest

from draftsmith.bench import bundle, tables
from draftsmith.bench.bundle import BundleWriter
from draftsmith.bench.compare import compare
from draftsmith.bench.report.document import document as document_of
from draftsmith.bench.report.render import to_markdown
from draftsmith.bench.runs import Difference
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
    with pytest.raises(UserError, match="space"):
        writer.end(measured, summarise_run(measured))
    assert bundle.read(tmp_path / "out").runs == measured.runs


def _is_half_removed(out):
    """An old bundle on its way out: no more a bundle that is whole, not yet one that was begun."""
    return not any((out / name).exists() for name in ("summary.json", "journal.jsonl")) and (
        any((out / name).exists() for name in ("runs.jsonl", "outputs.jsonl"))
    )


class Killed(BaseException):
    """As by a signal: nothing after it runs."""


def test_a_run_killed_at_any_write_leaves_a_bundle(arms, tmp_path, monkeypatch):
    """Whichever file it was about to put in place or to remove; the old bundle below it was replaced by --force."""
    work = workload("abc")
    measured = measured_run(arms, work)
    moments = count = 0
    real = {"replace": os.replace, "unlink": Path.unlink, "touch": Path.touch}

    def counted(name):
        def call(*arguments, **named):
            nonlocal count
            count += 1
            if count == moments:
                raise Killed
            return real[name](*arguments, **named)

        return call

    monkeypatch.setattr(os, "replace", counted("replace"))
    monkeypatch.setattr(Path, "unlink", counted("unlink"))
    monkeypatch.setattr(Path, "touch", counted("touch"))
    whole = 0
    for moments in range(1, 60):
        out = tmp_path / str(moments)
        count = -1000
        write(measured, work, out)
        count = 0
        try:
            write(measured, work, out, force=True)
        except Killed:
            found = None
            if (out / "config.json").exists() and not _is_half_removed(out):
                found = bundle.read(out)
                assert measured.runs[: len(found.runs)] == found.runs
                whole += found == measured
            count = -1000
            write(measured, work, out, force=True)
            assert bundle.read(out) == measured
            assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
        else:
            break
    assert 30 < moments < 59
    assert whole >= 2  # before the old one was touched, and when only the journal was left to remove


def test_a_journal_cut_inside_a_character_is_read_up_to_there(arms, tmp_path):
    work = workload("abc")
    measured = measured_run(arms, work, stop_after=2)
    begin(measured, work, tmp_path / "out")
    with (tmp_path / "out" / "journal.jsonl").open("ab") as stream:
        stream.write('{"arm": "é"'.encode()[:-2])
    assert bundle.read(tmp_path / "out").runs == measured.runs


def test_a_full_disk_is_one_line_and_keeps_what_was_there(arms, tmp_path, monkeypatch):
    work = workload("abc")
    measured = measured_run(arms, work)
    writer = begin(measured, work, tmp_path / "out")
    monkeypatch.setattr(bundle, "write_table", lambda *_: Path("/dev/full").write_text("x"))
    with pytest.raises(UserError, match=r"cannot write the bundle .*No space left on device; what was"):
        writer.end(measured, summarise_run(measured))
    assert bundle.read(tmp_path / "out").runs == measured.runs


def test_texts_that_utf8_cannot_hold_are_written_and_read_back(arms, tmp_path):
    """A file's name may hold bytes that are no text; an answer is mended before it comes here."""
    work = workload("abc")
    measured = measured_run(arms, work, prompts="caf\udce9.jsonl")
    write(measured, work, tmp_path / "out")
    assert bundle.read(tmp_path / "out") == measured


def test_an_old_bundle_is_kept_unless_forced(arms, tmp_path):
    work = workload("abc")
    write(measured_run(arms, work), work, tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(OptionError, match="--force"):
        BundleWriter(tmp_path / "out", force=False)
    BundleWriter(tmp_path / "out", force=True)  # it goes when a new one begins: until then much can go wrong
    assert bundle.read(tmp_path / "out").runs
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


def test_bundles_of_other_versions_and_half_foreign_ones_are_refused_by_name(arms, tmp_path):
    work = workload("abc")
    write(measured_run(arms, work), work, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for change, told in {
        "schema": (7, "written by another version .schema 7"),
        "arms": ("none", "benchmark's"),
        "baseline": ("nobody", "baseline among them"),
        "targets": ({"speed": 1.0}, "speed"),
        "failed_prompts": (3, "failed_prompts is 3"),
        "descriptions": ({"none": {"bits_per_weight": "four"}}, "bits_per_weight is 'four'"),
        "hardware": ({"memory_bytes": "much"}, "memory_bytes is 'much'"),
    }.items():
        path.write_text(json.dumps(config | {change: told[0]}))
        with pytest.raises(UserError, match=told[1]):
            bundle.read(tmp_path / "out")
    path.write_text(json.dumps({name: value for name, value in config.items() if name != "load"}))
    with pytest.raises(UserError, match="lacks load"):
        bundle.read(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    path.write_text(json.dumps(config))
    (tmp_path / "out" / "summary.json").write_text(json.dumps(summary | {"schema": 1}))
    with pytest.raises(UserError, match="schema 1"):
        bundle.read(tmp_path / "out")


def test_differences_are_found_in_the_ids_not_taken_from_the_file(arms, tmp_path):
    work = workload("abc")
    write(measured_run(arms, work, gap=3e-5), work, tmp_path / "out")
    path = tmp_path / "out" / "outputs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["arm"] == "other" and row["prompt"] == 0:
            row["token_ids"][4] = 7
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {(key.arm, key.prompt): item for key, item in bundle.read(tmp_path / "out").differences.items()}
    assert found["other", 0] == Difference(position=4, gap=None)
    assert found["ngram", 1] == Difference(position=5, gap=3e-5)


ODD = [None, True, -1, 0, 3.5, 10**400, float("nan"), float("-inf"), "x", "", "\ud83d", [], [[]], {}, {"a": 1}, [None]]


def _places(value, place=()):
    """Every place in a document."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _places(item, (*place, name))


def _changed(value, place, odd):
    if not place:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = _changed(copy[place[0]], place[1:], odd)
    return copy


@pytest.mark.parametrize("finished", [True, False])
def test_an_edited_log_is_read_or_is_one_clear_error(arms, tmp_path, monkeypatch, finished):
    """300 edits at random: whatever can be read can be scored, compared and shown."""
    monkeypatch.setattr(tables, "has_parquet", lambda: False)
    work = workload("abcd", categories=["x", "y"] * 2, concurrency=2)
    measured = measured_run(arms, work, gap=3e-5)
    out = tmp_path / "out"
    writer = begin(measured, work, out)
    if finished:
        writer.end(measured, summarise_run(measured))
    draw = random.Random(5)
    paths = sorted(path for path in out.iterdir() if path.name != "prompts.jsonl")
    refused = 0
    for _ in range(300):
        path = draw.choice(paths)
        before = path.read_text()
        lines = [before] if path.suffix == ".json" else before.splitlines()
        line = draw.randrange(len(lines))
        document = json.loads(lines[line])
        place = draw.choice(list(_places(document))[1:])
        lines[line] = json.dumps(_changed(document, place, draw.choice(ODD)))
        path.write_text("".join(line + "\n" for line in lines))
        try:
            found = bundle.read(out)
            summary = json.loads(json.dumps(summarise_run(found)))
            to_markdown(document_of([("run", summary, found)], draw=False))
            compare(found, measured, prompts=(bundle.read_prompts(out),) * 2, resamples=100)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), (path.name, place)
        path.write_text(before)
    assert 100 < refused < 300
