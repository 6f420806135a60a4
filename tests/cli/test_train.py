"""`draftsmith train`: from a recipe to a drafter on disk, and every mistake in one line."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
import yaml

from draftsmith.engine.loading import load_model
from draftsmith.training import plan as plan_module
from draftsmith.training.corpus import CorpusTarget, CorpusWriter, vocabulary_digest
from tests.cli.tiny import ALPHABET, ENVIRONMENT, command, run
from tests.io.samples import TOKENS

METHOD = "tests.training.tiny:TinyEagle"


def write_texts(path, model, num_texts, seed):
    """Prompts of a few letters and what the model spells after them."""
    draw = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    loaded = load_model(str(model), backend="reference")
    vocab_size = loaded.backend.spec.vocab_size
    target = CorpusTarget(name="tiny", vocab_size=vocab_size, tokenizer=vocabulary_digest(loaded.tokenizer))
    writer = CorpusWriter(path, target)
    for _ in range(num_texts):
        start, prompt_len, answer_len = draw.randrange(len(ALPHABET)), draw.randrange(2, 5), draw.randrange(8, 30)
        letters = [ALPHABET[(start + place) % len(ALPHABET)] for place in range(prompt_len + answer_len)]
        tokens = [TOKENS.index(letter) for letter in letters]
        writer.add(tokens, [place >= prompt_len for place in range(len(tokens))])
    writer.finish()


@pytest.fixture(scope="module")
def texts(tmp_path_factory, tiny):
    """A corpus of the tiny model with one to validate on."""
    path = tmp_path_factory.mktemp("texts") / "texts"
    write_texts(path, tiny, 20, 0)
    write_texts(path / "validation", tiny, 4, 1)
    return path


@pytest.fixture
def words(tiny, texts, tmp_path):
    """A complete command; more words may follow."""
    return [
        "train", "--method", METHOD, "--model", tiny, "--data", texts, "--output", tmp_path / "out",
        "--set", "taps=0-1-2", "--steps", "6", "--depths", "2", "--batch-tokens", "200", "--threads", "1",
        "--backend", "reference",
    ]  # fmt: skip


@pytest.fixture
def complaint(capsys):
    """Runs a command that must fail; returns its one line."""

    def call(*arguments):
        capsys.readouterr()
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert lines[-1].startswith("draftsmith: error: ")
        assert sum("error" in line for line in lines) == 1
        assert "Traceback" not in captured.err
        return lines[-1]

    return call


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_drafter_comes_out(words, tmp_path, capsys):
    assert run(*words) == 0
    captured = capsys.readouterr()
    assert "6 steps" in captured.out
    assert "tokens per step at temperature 0" in captured.out
    assert (tmp_path / "out" / "model.safetensors").exists()
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert recipe["method"] == METHOD
    assert recipe["configure"] == {"taps": "0-1-2"}


def test_a_recipe_is_the_same_run(words, tmp_path, capsys):
    assert run(*words) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((tmp_path / "out" / "recipe.yaml").read_text().replace("/out", "/again"))
    assert run("train", recipe, "--json") == 0
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "train.jsonl").read_text().splitlines()]
        for name in ("out", "again")
    ]
    assert losses[0] == losses[1]


def test_options_go_before_the_recipe(words, texts, tiny, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"method: {METHOD}\nmodel: {tiny}\ndata: {texts}\noutput: {tmp_path / 'out'}\nlr: 5e-4\nbatch-tokens: 100\n"
        "steps: 2\nset: {taps: 0-1-2, mlp_width: 8}\nbackend: reference\ndepths: 2\n"
    )
    assert run("train", recipe, "--lr", "0.25", "--set", "mlp_width=16") == 0
    used = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert used["lr"] == 0.25
    assert used["batch_tokens"] == 100
    assert used["configure"] == {"taps": "0-1-2", "mlp_width": "16"}


def test_a_plan_is_told_and_nothing_begins(words, tmp_path, capsys):
    assert run(*words, "--plan") == 0
    told = capsys.readouterr().out
    for word in ("trained parameters", "disk", "memory", "training", "tokens/s"):
        assert word in told
    assert run(*words, "--plan", "--json", "--cache", tmp_path / "cache") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 6
    assert plan["parameters"] > 1000
    assert plan["seconds"] > 0
    assert plan["cache_bytes"] > 0
    assert plan["tried"] == 3
    assert list(tmp_path.iterdir()) == []


def test_a_plan_of_slow_steps_times_one_of_them(words, monkeypatch, capsys):
    monkeypatch.setattr(plan_module, "_TRIAL_SECONDS", 0.0)
    assert run(*words, "--plan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tried"] == 1


def test_a_plan_of_a_run_that_only_seconds_end(words, capsys):
    """Regression: it promised 2 ** 40 steps."""
    words = list(words)
    at = words.index("--steps")
    timed = [*words[:at], *words[at + 2 :], "--max-seconds", "50"]
    assert run(*timed, "--plan", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] is None and plan["seconds"] == pytest.approx(50, rel=0.01)
    both = 1 / plan["tokens_per_second"] + 1 / plan["feature_tokens_per_second"]
    assert plan["trained_tokens"] == pytest.approx(50 / both, rel=0.01)
    assert run(*timed, "--plan") == 0
    assert "as many as the time allows: about" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--output", "--cache"])
def test_a_plan_for_a_place_that_cannot_be(words, tmp_path, complaint, option):
    (tmp_path / "file").touch()
    line = complaint(*words, "--plan", option, tmp_path / "file" / "x")
    assert "cannot be written there" in line and "is not a directory" in line


def test_a_live_check_on_training_texts_is_told(words, tiny, tmp_path, capsys):
    write_texts(tmp_path / "alone", tiny, 6, 0)
    assert run(*words, "--data", tmp_path / "alone", "--plan", "--live-texts", "2") == 0
    assert "--live-texts takes prompts that it was trained on" in capsys.readouterr().err


def test_a_live_check_that_finds_nothing_to_compare_fails_no_training(words, tiny, tmp_path, capsys):
    """Regression: the drafter was written, and the command ended with an error and no summary."""
    loaded = load_model(str(tiny), backend="reference")
    target = CorpusTarget(
        name="tiny", vocab_size=loaded.backend.spec.vocab_size, tokenizer=vocabulary_digest(loaded.tokenizer)
    )
    for name in ("all", "all/validation"):
        (tmp_path / name).mkdir()
        writer = CorpusWriter(tmp_path / name, target)
        for start in range(6):
            tokens = [TOKENS.index(ALPHABET[(start + place) % len(ALPHABET)]) for place in range(20)]
            writer.add(tokens, [True] * 20)  # answers to nothing
        writer.finish()
    assert run(*words, "--data", tmp_path / "all", "--live-texts", "2", "--json") == 0
    captured = capsys.readouterr()
    assert "no live check: " in captured.err and json.loads(captured.out)["live"] == {}
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (None, "stopped while /some/cache was filled; the same command"),
        (KeyboardInterrupt(), "interrupted; there is no"),
    ],
    ids=["while features are kept", "twice"],
)
def test_stopped_before_the_first_state(words, monkeypatch, capsys, ends, told):
    """The first was an error of the user's, the second ended without a word."""

    def carry_out(*arguments, **more):
        if ends is not None:
            raise ends

    monkeypatch.setattr("draftsmith.training.run.carry_out", carry_out)
    monkeypatch.setattr("draftsmith.training.places._check_place", lambda name, path: None)
    assert run(*words, "--cache", "/some/cache") == 130
    assert f"draftsmith: {told}" in capsys.readouterr().err


def test_one_of_two_begins_anew_while_the_other_is_at_work(words, tmp_path, complaint):
    """Its state was deleted, the lock too, and both wrote into one directory."""
    state = tmp_path / "out.state"
    state.mkdir()
    (state / "train.jsonl").write_text("{}\n")
    with (state / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run is at work" in complaint(*words, "--force")
    assert (state / "train.jsonl").read_text() == "{}\n"


def test_features_of_other_weights_under_one_name_are_refused(words, tiny, other, tmp_path, complaint, capsys):
    model = shutil.copy(tiny, tmp_path / "model.gguf")
    more = ["--cache", tmp_path / "cache", "--model", model]
    assert run(*words, *more) == 0
    moved = shutil.copy2(model, tmp_path / "moved.gguf")
    assert run(*words, *more[:2], "--model", moved, "--output", tmp_path / "second") == 0
    shutil.copy(other, model)
    assert "a target with other weights" in complaint(*words, *more, "--output", tmp_path / "third")
    assert "a target with other weights" in complaint(*words, "--model", model)


@pytest.fixture
def several():
    """Starts two processes as torchrun does, which keeps what they share in its own process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    yield lambda *words: [  # the store ends with the test
        subprocess.Popen(
            command(*words, "--accumulate", "2"),
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("more", "code"), [(["--lr", "0"], 2), (["--max-len", "5"], 2), (["--plan"], 0)], ids=["early", "late", "plan"]
)
def test_several_processes_speak_once(words, several, more, code):
    processes = several(*words, *more)
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [code, code], said
    assert said[0][0] or "draftsmith: error: " in said[0][1]
    assert said[1][0] == ""
    assert "draftsmith:" not in said[1][1]


def test_a_process_that_is_killed_is_told_by_the_other(words, several, tmp_path):
    processes = several(*words, "--steps", "100000", "--save-every", "0.01")
    try:
        state = tmp_path / "out.state" / "last.safetensors"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not state.exists():
            time.sleep(0.05)
        processes[1].kill()
        _, said = processes[0].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[0].returncode == 2
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    assert "another process of this run went away" in line and str(state) in line and "goes on from there" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_and_the_same_command_goes_on(words, tmp_path, number, capsys):
    log = tmp_path / "out.state" / "train.jsonl"
    long = [*words, "--steps", "400"]
    process = subprocess.Popen(
        command(*long), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count('"step"') > 4):
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "the same command goes on from there" in said
    assert not (tmp_path / "out").exists()
    stopped = json.loads(log.read_text().splitlines()[-1])["step"]
    assert 0 < stopped < 400
    assert run(*words, "--steps", "400") == 0
    assert f"going on from step {stopped}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--method", "eagel"], ["eagel"]),
        (["--method", "suffix"], ["suffix", "no weights to train"]),
        (["--data", "/nowhere"], ["/nowhere", "data prepare"]),
        (["--loss", "luck"], ["luck", "kl"]),
        (["--lr", "0"], ["lr", "0"]),
        (["--lr", "nan"], ["lr", "nan"]),
        (["--steps", "0"], ["steps", "0"]),
        (["--compute", "int8"], ["int8", "bfloat16"]),
        (["--dtype", "int8"], ["int8", "bfloat16"]),
        (["--decay", "2"], ["decay"]),
        (["--warmup", "2"], ["warmup"]),
        (["--set", "taps"], ["--set taps", "KEY=VALUE"]),
        (["--set", "taps=0-99"], ["99"]),
        (["--set", "colour=red"], ["colour"]),
        (["--draft-vocab", "100000"], ["100000"]),
        (["--max-len", "5"], ["longer than 5", "--max-len"]),
        (["--output", "/proc/drafter"], ["/proc/drafter", "cannot be written"]),
        (["--model", "/nowhere/model"], ["/nowhere/model"]),
        (["--threads", "100000"], ["threads", "at most 1024"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes(words, complaint, more, parts, tmp_path):
    line = complaint(*words, *more)
    for part in parts:
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_texts_of_another_tokenizer(words, complaint, tmp_path, tiny):
    data = tmp_path / "data"
    write_texts(data, tiny, 2, 0)
    about = json.loads((data / "data.json").read_text())
    about["target"]["tokenizer"] = "0" * 64
    (data / "data.json").write_text(json.dumps(about))
    assert "spells other tokens" in complaint(*words, "--data", data)


def test_an_empty_corpus(words, complaint, tmp_path, tiny):
    write_texts(tmp_path / "data", tiny, 0, 0)
    assert "nothing is left to train on" in complaint(*words, "--data", tmp_path / "data")


def test_an_output_that_is_there(words, complaint, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    for more in ([], ["--force"]):
        assert "holds no drafter" in complaint(*words, *more)
        assert (tmp_path / "out" / "thesis.txt").exists()
    for place in (".", "", "/"):
        assert "working directory" in complaint(*words, "--force", "--output", place)


def test_a_seed_or_depths_that_cannot_be(words, complaint):
    assert "seed is" in complaint(*words, "--seed", 10**23)
    heads = [
        word if word != METHOD else "medusa" for word in words if word not in ("--set", "taps=0-1-2", "--depths", "2")
    ]
    assert "this drafter has 4" in complaint(*heads, "--depths", "99")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n", "options and their values"),
        ("a: [", "not valid YAML"),
        ("colour: red\n", "unknown key 'colour'; see draftsmith train --help"),
        ("batch_token: 1\n", "unknown key 'batch_token'; nearest are batch-tokens"),
        ("plan: true\n", "give --plan on the command line"),
        ("lr: 1\nlr: 2\n", "lr stands there twice"),
        ("set: {taps: 0-1-2, taps: 0}\n", "taps stands there twice"),
        ("set: {taps: 0-1-2}\nconfigure: {taps: 0}\n", "configure stands there twice"),
        ("steps: many\n", "a whole number is needed"),
        ("steps: true\n", "a whole number is needed"),
        ("lr: fast\n", "a number is needed"),
        ("set: taps\n", "a mapping"),
        ("method: eagle3\n", "--model and --data and --output must be given"),
        ("batch_tokens: 1\nbatch-tokens: 2\n", "twice"),
    ],
)
def test_recipes_that_are_wrong(complaint, tmp_path, text, part):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    line = complaint("train", recipe)
    assert part in line
    assert str(recipe) in line


def test_a_recipe_that_is_not_there(complaint, tmp_path):
    assert "cannot be read" in complaint("train", tmp_path / "none.yaml")


def test_the_engine_gains_what_validation_says(words, tmp_path, capsys):
    """The replayed figure and the engine's are of the same answers, so they differ by nothing but arithmetic."""
    more = ["--method", "eagle3", "--set", "taps=0-1-2", "--steps", "60", "--lr", "1e-2", "--live-texts", "4", "--json"]
    assert run(*words, *more) == 0
    told = json.loads(capsys.readouterr().out)
    live = told["live"]
    assert live["engine"] > 1.5
    assert abs(live["difference"]) < 0.05


# -- whole models: a student, a tuned target ----------------------------------------------------------


@pytest.fixture
def model_words(tiny, texts, tmp_path):
    """A command that trains a whole model, without a method."""
    return [
        "train", "--model", tiny, "--data", texts, "--output", tmp_path / "out", "--steps", "60", "--lr", "1e-2",
        "--batch-tokens", "200", "--threads", "1", "--validate-every", "30", "--json",
    ]  # fmt: skip


STUDENT = ["--method", "draft_model", "--set", "width=32", "--set", "heads=2", "--set", "layers=1"]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_student_is_a_model_and_the_engine_gains_what_validation_says(model_words, tiny, tmp_path, capsys, backend):
    assert run(*model_words, *STUDENT, "--backend", backend, "--live-texts", "4") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["live"]["engine"] > 1.5
    assert abs(told["live"]["difference"]) < 0.05
    words = ["generate", "--model", tiny, "--backend", backend, "--max-new-tokens", "20", "abc"]
    assert run(*words, "--drafter", "none") == 0
    plain = capsys.readouterr().out
    assert run(*words, "--drafter", f"draft_model:model={tmp_path / 'out'}") == 0
    assert capsys.readouterr().out == plain
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"--model {tiny} --drafter draft_model:model={tmp_path / 'out'}" in card
    assert run("generate", "--model", tmp_path / "out", "--backend", backend, "--max-new-tokens", "5", "abc") == 0


def test_a_student_on_its_own_answers(model_words, tmp_path, capsys):
    own = ["--on-policy", "0.5", "--refresh", "10", "--loss", "reverse_kl", "--backend", "reference"]
    assert run(*model_words, *STUDENT, *own, "--plan") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["written_tokens"] > 100
    assert plan["writing_tokens_per_second"] > 1
    assert list(tmp_path.iterdir()) == []
    assert run(*model_words, *STUDENT, *own) == 0
    assert json.loads(capsys.readouterr().out)["greedy_tokens_per_step"] > 1.5


def test_a_student_begins_as_layers_of_the_target(model_words, tiny, tmp_path, capsys):
    start = ["--method", "draft_model", "--set", f"init={tiny}", "--set", "layers=1", "--steps", "4"]
    assert run(*model_words, *start, "--backend", "reference") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    assert config["config"]["layers"] == [0]


def test_a_tuned_target_is_a_model_of_its_own(model_words, tiny, tmp_path, capsys):
    tuned = ["--method", "medusa2", "--set", "rank=2", "--set", "num_depths=2", "--depths", "2", "--live-texts", "3"]
    assert run(*model_words, *tuned, "--backend", "reference") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["live"]["engine"] > 1.5
    assert abs(told["live"]["difference"]) < 0.05
    assert 0 < told["agreement"] <= 1
    out = tmp_path / "out"
    words = ["generate", "--backend", "reference", "--max-new-tokens", "20", "abc"]
    assert run(*words, "--model", out / "model", "--drafter", "none") == 0
    plain = capsys.readouterr().out
    assert run(*words, "--model", out / "model", "--drafter", f"medusa2:path={out}:tree=4") == 0
    assert capsys.readouterr().out == plain
    card = (out / "README.md").read_text()
    assert f"--model {out / 'model'} --drafter medusa2:path={out}" in card
    assert "one of its own" in card
    assert json.loads((out / "config.json").read_text())["target"]["name"] == str(out / "model")


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--method", "draft_model", "--set", "width=30", "--set", "heads=4"], ["width 30 over 4 heads"]),
        (["--method", "draft_model", "--set", "init=/nowhere/model"], ["/nowhere/model"]),
        ([*STUDENT, "--draft-vocab", "30"], ["whole vocabulary"]),
        ([*STUDENT, "--on-policy", "2"], ["on_policy is 2", "0 to 1"]),
        ([*STUDENT, "--refresh", "0"], ["refresh is 0"]),
        (["--method", "medusa", "--on-policy", "0.5"], ["cannot write answers by itself"]),
        (["--method", "medusa2", "--set", "tune=much"], ["tune is 'much'", "lora"]),
        (["--method", "hydra", "--set", "dropout=2"], ["dropout is 2.0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_about_models(model_words, complaint, more, parts, tmp_path):
    line = complaint(*model_words, *more, "--backend", "reference")
    for part in parts:
        assert part in line
    assert list(tmp_path.iterdir()) == []


def test_heads_of_a_tuned_target_beside_another(model_words, tiny, complaint, tmp_path, capsys):
    assert run(*model_words, "--method", "medusa2", "--steps", "2", "--backend", "reference") == 0
    line = complaint("generate", "--model", tiny, "--drafter", f"medusa2:path={tmp_path / 'out'}", "abc")
    assert f"--model {tmp_path / 'out' / 'model'}" in line
