"""`draftsmith convert`: there and back, what is printed, the check, and every mistake in one line."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.cli.convert_check import Checked, check_drafter, written_texts
from draftsmith.cli.train import target_info
from draftsmith.drafters.checkpoint import read_checkpoint, save_module
from draftsmith.engine.loading import load_model
from draftsmith.training.features import TargetScorer, collate
from tests.cli.tiny import run
from tests.drafters.trained import fit, new_module


@pytest.fixture(scope="module")
def loaded(tiny):
    return load_model(str(tiny), backend="reference")


@pytest.fixture(scope="module")
def trained(tiny, loaded, tmp_path_factory):
    """An EAGLE-3 drafter that has learnt what the tiny model spells, fed from taps 0, 1 and 2."""
    info = target_info(loaded, load_model)
    module = new_module("eagle3", info, {"taps": "0-1-2", "num_heads": "6", "num_kv_heads": "6"})
    texts = written_texts(loaded)
    batch = collate(texts, TargetScorer(loaded.backend, module.needs).score(texts))
    fit(module, batch, 60, lr=1e-2)
    path = tmp_path_factory.mktemp("trained") / "eagle3"
    save_module(path, "eagle3", module.eval(), str(tiny), info, {})
    return path


@pytest.fixture
def complaint(capsys):
    """Runs a command that must fail; returns its one line."""

    def call(*arguments):
        capsys.readouterr()
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("draftsmith: error: ")
        return line

    return call


def test_there_and_back(trained, tiny, tmp_path, capsys):
    assert run("convert", trained, "-o", tmp_path / "out", "--to", "eagle3") == 0
    printed = capsys.readouterr().out
    assert "(native) -> " in printed and "taps" in printed
    assert run("convert", tmp_path / "out", "-o", tmp_path / "back", "-m", tiny, "--backend", "reference") == 0
    captured = capsys.readouterr()
    assert "first drafts are the target's own token" in captured.out and "use it: draftsmith generate" in captured.out
    assert captured.err == ""
    ours, theirs = (load_file(path / "model.safetensors") for path in (trained, tmp_path / "back"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert read_checkpoint(tmp_path / "back").config == read_checkpoint(trained).config
    assert read_checkpoint(tmp_path / "back").about["imported"]["dialect"] == "eagle3"


def test_json_says_what_the_lines_say(trained, tiny, tmp_path, capsys):
    words = ["convert", trained, "-o", tmp_path / "one", "--to", "eagle3-speculators", "--num-draft", "7", "--json"]
    assert run(*words) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["from"], document["to"], document["method"]) == ("native", "eagle3-speculators", "eagle3")
    assert document["check"] is None and document["warnings"] == []
    assert {item["topic"] for item in document["translated"]} >= {"taps", "residual", "fed back"}
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    words = ["convert", tmp_path / "one", "-o", tmp_path / "two", "-m", tiny, "--json", "--backend", "reference"]
    assert run(*words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["check"]["share"] > 0.8 and document["check"]["positions"] > 60
    assert run("convert", tmp_path / "one", "-o", tmp_path / "three", "-m", tiny, "--json", "--no-check") == 0
    assert json.loads(capsys.readouterr().out)["check"] is None


def test_the_converted_drafter_drafts(trained, tiny, tmp_path, capsys):
    run("convert", trained, "-o", tmp_path / "out", "--to", "eagle3")
    run("convert", tmp_path / "out", "-o", tmp_path / "back", "-m", tiny, "--no-check")
    capsys.readouterr()
    words = ["--model", tiny, "--backend", "reference", "--max-new-tokens", "12", "--raw", "--json", "abc"]
    answers = []
    for drafter in ("none", f"eagle3:path={tmp_path / 'back'}"):
        assert run("generate", "--drafter", drafter, *words) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["text"] == answers[1]["text"]


def test_a_drafter_that_does_not_fit_is_noticed(trained, loaded, tiny, tmp_path):
    checkpoint = read_checkpoint(trained)
    right = check_drafter(checkpoint, str(tiny), backend="reference", threads=None)
    assert right.share > 0.8 and right.warnings == [] and right.others == {}
    info = target_info(loaded, load_model)
    module = new_module("eagle3", info, {"taps": "0-1"}, seed=3)
    torch.nn.init.normal_(module.lm_head.weight)
    save_module(tmp_path / "noise", "eagle3", module, str(tiny), info, {})
    wrong = check_drafter(read_checkpoint(tmp_path / "noise"), str(tiny), backend="reference", threads=None)
    assert wrong.share < 0.25 and set(wrong.others) == {(1, 2)}  # the other reading of the ids was tried
    assert "only" in wrong.warnings[0]


def test_other_taps_are_advised_only_when_they_do_much_better():
    found = Checked(positions=100, accepted=10, taps=(1, 2), others={(0, 1): 60, (2, 3): 70})
    assert "--set taps=2-3" in found.warnings[1]
    assert len(Checked(positions=100, accepted=10, taps=(1, 2), others={(0, 1): 19}).warnings) == 1
    assert Checked(positions=100, accepted=25, taps=None, others={}).warnings == []


def test_a_target_that_cannot_run_is_no_obstacle(trained, tiny, tmp_path, capsys):
    run("convert", trained, "-o", tmp_path / "out", "--to", "eagle3")
    words = ["convert", tmp_path / "out", "-o", tmp_path / "back", "-m", tiny, "--backend", "nonsense"]
    assert run(*words) == 0
    assert "not checked" in capsys.readouterr().err
    assert read_checkpoint(tmp_path / "back").method == "eagle3"


def test_mistakes(trained, tiny, tmp_path, complaint):
    out = tmp_path / "out"
    assert "--to NAME" in complaint("convert", trained, "-o", out)
    assert "unknown dialect 'gguf'" in complaint("convert", trained, "-o", out, "--to", "gguf")
    assert "holds drafters of medusa" in complaint("convert", trained, "-o", out, "--to", "medusa")
    assert "not 'inputs'" in complaint("convert", trained, "-o", out, "--to", "eagle3", "--layer-ids", "inputs")
    assert "KEY=VALUE" in complaint("convert", trained, "-o", out, "--to", "eagle3", "--set", "taps")
    assert "at least 1" in complaint("convert", trained, "-o", out, "--to", "eagle3", "--num-draft", "0")
    assert "no such directory" in complaint("convert", tmp_path / "gone", "-o", out, "-m", tiny)
    assert not out.exists()
    out.mkdir()
    (out / "thesis.txt").touch()
    for more in ([], ["--force"]):
        assert "holds no drafter" in complaint("convert", trained, "-o", out, "--to", "eagle3", *more)
    for place in (".", "", "/"):
        assert "working directory" in complaint("convert", trained, "-o", place, "--to", "eagle3", "--force")
    shutil.rmtree(out)
    assert f"--drafter eagle3:path={trained}" in complaint("generate", "-m", trained, "hello")
    assert run("convert", trained, "-o", out, "--to", "eagle3") == 0
    assert "--model NAME" in complaint("convert", out, "-o", tmp_path / "next")
    words = ["convert", out, "-o", tmp_path / "next", "-m", tiny, "--set"]
    assert "beyond the target's" in complaint(*words, "taps=0-1-99")
    assert "exists" in complaint("convert", trained, "-o", out, "--to", "eagle3")
    assert "is the source itself" in complaint("convert", out, "-o", out, "-m", tiny, "--force")
    assert "is a file" in complaint("convert", trained, "-o", out / "config.json", "--to", "eagle3", "--force")
    assert "not a drafter of this package" in complaint("convert", out, "-o", tmp_path / "x", "--from", "native")
    assert "no Medusa heads" in complaint("convert", out, "-o", tmp_path / "x", "--from", "medusa", "-m", tiny)
    assert run("convert", trained, "-o", out, "--to", "eagle3-speculators", "--force") == 0


def test_what_is_there_stays_when_a_conversion_fails(trained, tiny, tmp_path, complaint):
    run("convert", trained, "-o", tmp_path / "out", "--to", "eagle3")
    kept = tmp_path / "kept"
    run("convert", tmp_path / "out", "-o", kept, "-m", tiny, "--no-check")
    before = (kept / "model.safetensors").read_bytes()
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    complaint("convert", tmp_path / "out", "-o", kept, "-m", tiny, "--no-check", "--force")
    assert (kept / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "out"]


def test_reading_a_foreign_directory_as_a_drafter_names_the_command(trained, tiny, tmp_path, complaint):
    run("convert", trained, "-o", tmp_path / "out", "--to", "eagle3")
    line = complaint("generate", "--model", tiny, "--drafter", f"eagle3:path={tmp_path / 'out'}", "--raw", "abc")
    assert "draftsmith convert" in line
