"""`draftsmith calibrate`: what it keeps, what it shows, and how it ends when something is wrong."""

import dataclasses
import json
import shutil

import pytest

from draftsmith.cli.calibrate_view import print_costs
from draftsmith.control.cost_table import CostTable, DraftSeconds
from draftsmith.engine import calibration, loading
from draftsmith.engine.cost_store import cost_file, read_costs, write_costs
from draftsmith.engine.loading import load_model, model_identity
from tests.cli.tiny import run, write_tiny

QUICK = ("--repeats", "3", "--max-context", "64", "--threads", "1")
TABLE = CostTable(
    rows=(1, 2, 4, 8, 16, 32, 64),
    contexts=(64,),
    verify=((1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3),),
    spread=((0.04,) * 7,),
    about={"model": "somewhere/tiny.gguf"},
)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def calibrated(tiny):
    """The tiny model's costs, as if they had been measured."""
    write_costs(TABLE, cost_file(model_identity(str(tiny), threads=1)))
    return tiny


def make_bundle(model, output, num_tokens):
    arguments = ("-p", "builtin", "--limit", "1", "-n", num_tokens, "-d", "none", "--ignore-eos", "--threads", "1")
    assert run("bench", "-m", model, *arguments, "-o", output) == 0
    return output


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory):
    """A benchmark's bundle; tests change a copy."""
    return make_bundle(tiny, tmp_path_factory.mktemp("measured") / "bundle", 40)


def refusal(capsys, *arguments):
    """The one line that a command ends with."""
    capsys.readouterr()
    assert run("calibrate", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.out == ""
    return captured.err


def test_measured_costs_are_kept_for_the_engine_and_shown(tiny, other, tmp_path, capsys, monkeypatch):
    picture = tmp_path / "costs.svg"
    drafter = f"draft_model:model={other}"
    assert run("calibrate", "-m", tiny, *QUICK, "-d", drafter, "--picture", picture, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    table = read_costs(load_model(str(tiny), threads=1).identity)
    assert table is not None and document["draftsmith_costs"] == 1 and document["file"].startswith(str(tmp_path))
    assert table.contexts == (64,) and table.draft[drafter].level > 0 and table.own_step > 0
    assert table.about["model"] == str(tiny) and "other_cores" in table.about
    drawn = picture.read_text()
    assert drawn.count("<svg") == 1 and "context (tokens)" in drawn and "milliseconds per forward" in drawn
    assert ">tiny.gguf: what a forward costs here<" in drawn and "half of the" in drawn
    # Other threads, other costs.
    assert read_costs(model_identity(str(tiny), threads=2)) is None
    # Regression: a large model's weights were read to show a few numbers.
    monkeypatch.setattr(loading, "open_backend", None)
    assert run("calibrate", "-m", tiny, "--threads", "1", "--show") == 0
    shown = capsys.readouterr().out
    assert "milliseconds per forward" in shown and drafter in shown and "kept in" in shown
    assert "not measured" not in shown


def test_a_copy_of_the_model_has_its_costs_and_no_other_model(calibrated, other, tmp_path):
    # Regression: a second installation of the same file lost the calibration without a word.
    copy = shutil.copy(calibrated, tmp_path / "copy.gguf")
    assert model_identity(str(copy), threads=1) == load_model(str(calibrated), threads=1).identity
    assert run("calibrate", "-m", copy, "--threads", "1", "--show") == 0
    assert run("calibrate", "-m", other, "--threads", "1", "--show") == 2


def test_a_log_refreshes_what_is_kept_once(calibrated, measured, capsys):
    asked = ("-m", calibrated, "--threads", "1", "--refresh", measured)
    assert run("calibrate", *asked) == 0
    after = read_costs(model_identity(str(calibrated), threads=1))
    assert after.verify[0][0] != TABLE.verify[0][0]
    # Regression: the same steps counted again each time.
    assert "learned from before" in refusal(capsys, *asked)
    assert read_costs(model_identity(str(calibrated), threads=1)) == after


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digest": "another"}, "tiny.gguf is another file"),
        ({"backend": "native:bits=4"}, "its backend is native:bits=4 and not"),
        ({"threads": 7}, "its threads is 7 and not 1"),
        ({"processor": "Another"}, "its processor is Another and not"),
        (None, "does not say of which model file"),
    ],
)
def test_a_log_of_another_model_or_machine_is_refused(calibrated, measured, tmp_path, capsys, change, complaint):
    """Regression: any bundle changed any table."""
    bundle = shutil.copytree(measured, tmp_path / "bundle")
    config = json.loads((bundle / "config.json").read_text())
    details = config["descriptions"]["none"]["details"]
    if change is None:
        del details["identity"]
    else:
        details["identity"] |= change
    (bundle / "config.json").write_text(json.dumps(config))
    assert complaint in refusal(capsys, "-m", calibrated, "--threads", "1", "--refresh", bundle)
    assert read_costs(model_identity(str(calibrated), threads=1)) == TABLE


def test_a_log_without_steps_teaches_nothing(calibrated, tmp_path, capsys):
    bundle = make_bundle(calibrated, tmp_path / "bundle", 1)
    assert "teaches nothing" in refusal(capsys, "-m", calibrated, "--threads", "1", "--refresh", bundle)
    assert read_costs(model_identity(str(calibrated), threads=1)) == TABLE


def test_a_model_with_a_short_context(tmp_path, capsys):
    """Regression: prompts were encoded whole, and refused, before they were cut."""
    model = write_tiny(tmp_path / "short.gguf", context=160)
    assert run("calibrate", "-m", model, "-r", "3", "--threads", "1", "-d", "ngram") == 0
    table = read_costs(model_identity(str(model), threads=1))
    assert table.own_step > 0 and "ngram" in table.draft
    assert "each further sequence of a batch: -\n" in capsys.readouterr().out  # too short for the batches measured


def test_an_interrupt_keeps_what_is_done_and_says_what_is_not(tiny, monkeypatch, capsys):
    def interrupted(log):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "fit_own", interrupted)
    assert run("calibrate", "-m", tiny, *QUICK, "-d", "ngram") == 130
    table = read_costs(load_model(str(tiny), threads=1).identity)
    assert table is not None and table.verify[0][0] > 0 and table.own_step is None and "other_cores" in table.about
    told = capsys.readouterr().err.splitlines()[-1]
    assert (
        "interrupted: what forwards cost is kept in" in told
        and "not measured: the engine's own work, drafter ngram" in told
    )
    assert run("calibrate", "-m", tiny, "--threads", "1", "--show") == 0
    shown = capsys.readouterr().out
    # Regression: what was not measured was shown as costing 0 us.
    assert "the engine's own work: -\n" in shown and "not measured: the engine's own work, drafter ngram" in shown


def test_measuring_again_keeps_what_is_not_measured_again(tiny, monkeypatch, capsys):
    """Regression: calibrating for a second drafter, or an interrupt, lost what was known of the first one."""
    assert run("calibrate", "-m", tiny, *QUICK, "-d", "ngram") == 0
    first = read_costs(model_identity(str(tiny), threads=1))
    # `auto` is a name of another drafter, and engines look that one up.
    assert run("calibrate", "-m", tiny, *QUICK, "-d", "auto") == 0
    both = read_costs(model_identity(str(tiny), threads=1))
    assert set(both.draft) == {"ngram", "suffix"} and both.draft["ngram"] == first.draft["ngram"]
    assert "not measured" not in capsys.readouterr().out

    def interrupted(log):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "fit_own", interrupted)
    assert run("calibrate", "-m", tiny, *QUICK, "-d", "suffix") == 130
    assert "not measured: the engine's own work, drafter suffix" in capsys.readouterr().err
    after = read_costs(model_identity(str(tiny), threads=1))
    assert after.draft == both.draft and after.own_step == both.own_step and after.verify != both.verify


def test_an_interrupt_before_anything_is_measured(tiny, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "measure_verify", interrupted)
    assert run("calibrate", "-m", tiny, *QUICK) == 130
    assert "interrupted: nothing was measured" in capsys.readouterr().err


def test_what_is_shown_has_its_units_and_says_how_good_it_is(capsys, tmp_path):
    table = dataclasses.replace(
        TABLE,
        request=3e-5,
        request_context=0.0,
        own_step=1e-4,
        own_request=0.0,
        own_row=1e-8,
        draft={"m": DraftSeconds(request=0.0, level=5e-4, pending=2e-6, error=0.05)},
        about={**TABLE.about, "other_cores": 1.7},
    )
    print_costs(table, tmp_path, as_json=False)
    shown = capsys.readouterr().out
    assert "tokens that the model scores at once" in shown and "spread of repeats\n" in shown and "   4 %\n" in shown
    assert "each further sequence of a batch: 0.030 ms\n" in shown
    assert "the engine's own work: 0.100 ms per step\n" in shown
    assert (
        "drafter m: 0.500 ms per pass + 2.000 ms per 1000 tokens of prompt to read first (typically 5 % off)" in shown
    )
    assert "measured while 1.7 cores were busy with other work: measure again on a quiet machine\n" in shown
    print_costs(TABLE, tmp_path, as_json=False)
    assert "busy" not in capsys.readouterr().out


def test_the_place_is_checked_before_a_model_is_loaded(tiny, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(loading, "open_model", None)
    assert "costs cannot be kept in" in refusal(capsys, "-m", tiny, *QUICK)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--repeats", "1"), "--repeats is 1"),
        (("--max-context", "3"), "--max-context is 3"),
        (("--show", "-d", "ngram"), "--show measures nothing: leave --drafter out"),
        (("--show", "--refresh", "bundle"), "--show changes nothing"),
        (("--show", "--max-context", "64"), "--show measures nothing: leave --max-context out"),
        (("--refresh", "bundle", "-d", "ngram"), "--refresh measures nothing: leave --drafter out"),
        (("--refresh", "bundle", "--repeats", "5"), "--refresh measures nothing: leave --repeats out"),
        (("--show",), "nothing is known of"),
        (("-d", "oracle"), "unknown drafter"),
        (("-d", "draft_model:model=missing.gguf", *QUICK), "missing.gguf: no such file"),
        (("--picture", "costs.pdf"), "must end in .png or .svg"),
        (("--picture", "/no/such/place/costs.png"), "there is no directory"),
        (("--refresh", "/dev/null"), "nothing is known of"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tiny, arguments, complaint, capsys):
    assert complaint in refusal(capsys, "-m", tiny, "--threads", "1", *arguments)
