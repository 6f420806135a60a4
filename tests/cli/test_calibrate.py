"""`draftsmith calibrate`: what it keeps, what it shows, and how it ends when something is wrong."""

import json

import pytest

from draftsmith.engine import calibration
from draftsmith.engine.cost_store import read_costs
from draftsmith.engine.loading import load_model, model_identity
from tests.cli.tiny import run

QUICK = ("--repeats", "3", "--max-context", "64", "--threads", "1")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


def test_measured_costs_are_kept_for_the_engine_and_shown(tiny, other, tmp_path, capsys):
    picture = tmp_path / "costs.svg"
    drafter = f"draft_model:model={other}"
    assert run("calibrate", "-m", tiny, *QUICK, "-d", drafter, "--picture", picture, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    table = read_costs(load_model(str(tiny), threads=1).identity)
    assert table is not None and document["draftsmith_costs"] == 1 and document["file"].startswith(str(tmp_path))
    assert table.contexts == (64,) and table.draft[drafter].level > 0 and table.own_step > 0
    assert table.about["model"] == str(tiny)
    assert picture.read_text().count("<svg") == 1
    # Other threads, other costs.
    assert read_costs(load_model(str(tiny), threads=2).identity) is None
    assert run("calibrate", "-m", tiny, "--threads", "1", "--show") == 0
    shown = capsys.readouterr().out
    assert "milliseconds" in shown and drafter in shown and "kept in" in shown


def test_a_log_refreshes_what_is_kept(tiny, tmp_path, capsys):
    assert run("calibrate", "-m", tiny, *QUICK) == 0
    before = read_costs(load_model(str(tiny), threads=1).identity)
    bundle = tmp_path / "bundle"
    arguments = ("-p", "builtin", "--limit", "1", "-n", "40", "-d", "none", "--ignore-eos", "--threads", "1")
    assert run("bench", "-m", tiny, *arguments, "-o", bundle) == 0
    assert run("calibrate", "-m", tiny, "--threads", "1", "--refresh", bundle) == 0
    after = read_costs(load_model(str(tiny), threads=1).identity)
    assert after.verify[0][0] != before.verify[0][0]
    assert after.verify[0][-1] == before.verify[0][-1]  # rows that no step had
    capsys.readouterr()


def test_a_copy_of_the_model_has_its_costs_and_no_other_model(tiny, other, tmp_path, capsys):
    # Regression: a second installation of the same file lost the calibration without a word.
    assert run("calibrate", "-m", tiny, *QUICK) == 0
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    assert model_identity(str(copy), threads=1) == load_model(str(tiny), threads=1).identity
    assert run("calibrate", "-m", copy, "--threads", "1", "--show") == 0
    assert run("calibrate", "-m", other, "--threads", "1", "--show") == 2


def test_an_interrupt_keeps_what_is_done(tiny, monkeypatch, capsys):
    def interrupted(log):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "fit_own", interrupted)
    assert run("calibrate", "-m", tiny, *QUICK) == 130
    table = read_costs(load_model(str(tiny), threads=1).identity)
    assert table is not None and table.verify[0][0] > 0 and table.own_step == 0.0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--repeats", "1"), "--repeats is 1"),
        (("--max-context", "3"), "--max-context is 3"),
        (("--show", "-d", "ngram"), "--show measures nothing"),
        (("--show",), "nothing is known of"),
        (("-d", "oracle"), "unknown drafter"),
        (("--picture", "costs.pdf"), "must end in .png or .svg"),
        (("--picture", "/no/such/place/costs.png"), "there is no directory"),
        (("--refresh", "/dev/null"), "nothing is known of"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tiny, arguments, complaint, capsys):
    assert run("calibrate", "-m", tiny, "--threads", "1", *arguments) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.err.count("\n") == 1 and captured.out == ""
