"""The loop: continued runs are the uninterrupted ones, and nothing broken reaches weights or disk."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal

import pytest
import torch

from draftsmith.drafters.checkpoint import read_checkpoint
from draftsmith.errors import DraftsmithError, OptionError
from draftsmith.training import state as states
from draftsmith.training.places import alone_in
from draftsmith.training.processes import Processes
from draftsmith.training.run import carry_out, finish
from draftsmith.training.state import read_state, write_state
from draftsmith.training.trainer import Listener, check_identity
from tests.training.tiny import BROKEN, METHOD, job_of, settings_of


def train(data, output, *, stop_after=None, **changes):
    """Run or continue; returns the trainer."""
    job = job_of(data, output, **changes)
    steps = []

    def stop():
        return stop_after is not None and len(steps) >= stop_after

    listener = Listener(on_step=lambda report, progress, num_steps: steps.append(report), stop=stop)
    trainer = carry_out(job, listener, Processes(), tell=lambda line: None)
    return job, trainer


def log_of(output, kind="step"):
    lines = (output.with_name(output.name + ".state") / "train.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if found["kind"] == kind]


def losses_of(output):
    return [(line["step"], line["loss"], line["gradient"]) for line in log_of(output)]


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run."""
    output = tmp_path_factory.mktemp("whole") / "drafter"
    torch.set_num_threads(1)
    job, trainer = train(data, output)
    return output, job, trainer


def test_a_run_learns(whole):
    output, _, trainer = whole
    losses = losses_of(output)
    assert trainer.finished
    assert [step for step, *_ in losses] == list(range(1, 9))
    assert losses[-1][1] < losses[0][1]
    assert log_of(output, "validation")[-1]["step"] == 8


@pytest.mark.parametrize("seed", range(3))
def test_a_continued_run_is_bit_for_bit_the_uninterrupted_one(data, tmp_path, whole, seed):
    output, _, expected = whole
    at = random.Random(seed).randrange(1, 8)
    _, stopped = train(data, tmp_path / "drafter", stop_after=at)
    assert not stopped.finished
    assert stopped.progress.step == at
    _, trainer = train(data, tmp_path / "drafter")
    assert losses_of(tmp_path / "drafter") == losses_of(output)
    for name, tensor in weights_of(trainer).items():
        assert torch.equal(tensor, weights_of(expected)[name]), name
    assert trainer.progress.tokens == expected.progress.tokens


def test_a_run_starts_from_a_trained_drafter(data, tmp_path, whole):
    _, job, trainer = whole
    finish(job, trainer)
    more = {"configure": {}, "draft_vocab": None, "init": whole[0]}
    begun, _ = train(data, tmp_path / "more", steps=1, lr=1e-9, **more)
    saved = read_checkpoint(whole[0])
    assert len(begun.module.draft_ids) == 48
    for name, tensor in begun.module.state_dict().items():
        assert torch.allclose(tensor, saved.tensors[name].to(tensor.dtype), atol=1e-6), name
    with pytest.raises(OptionError, match="leave out --set and --draft-vocab"):
        train(data, tmp_path / "other", init=whole[0])


def test_accumulating_halves_of_a_batch_is_one_step_over_both(data, tmp_path):
    _, trainer = train(data, tmp_path / "drafter", accumulate=2, steps=3)
    assert [step for step, *_ in losses_of(tmp_path / "drafter")] == [1, 2, 3]
    assert trainer.progress.step == 3


def test_one_pass_sees_every_text_once(data, tmp_path):
    job, trainer = train(data, tmp_path / "drafter", steps=None, passes=1, accumulate=3)
    assert trainer.progress.tokens == sum(int(job.corpus.lengths[index]) for index in job.kept)


def test_seconds_end_a_run(data, tmp_path):
    _, trainer = train(data, tmp_path / "drafter", steps=None, max_seconds=1e-3)
    assert trainer.finished
    assert trainer.progress.step >= 1


@pytest.mark.parametrize(("changes", "least"), [({"max_seconds": 0.5}, 3), ({"max_seconds": 60.0, "steps": 25}, 10)])
def test_a_run_that_seconds_may_end_is_judged_on_the_way(data, tmp_path, changes, least):
    """Regression: without a number of steps only its end was judged, so the best weights were the last ones."""
    _, trainer = train(data, tmp_path / "drafter", **{"steps": None, **changes})
    judged = [line["step"] for line in log_of(tmp_path / "drafter", "validation")]
    assert least <= len(judged) <= 11 and judged[-1] == trainer.progress.step
    assert judged == sorted(set(judged))


def test_a_state_of_other_settings_is_refused(data, tmp_path):
    train(data, tmp_path / "drafter", stop_after=2)
    with pytest.raises(OptionError, match=r"lr 0.01, and this one has 0.02; .*--force"):
        train(data, tmp_path / "drafter", lr=0.02)
    with pytest.raises(OptionError, match="over other training texts"):
        train(data / "validation", tmp_path / "drafter")


def test_a_state_of_other_weights_or_validation_texts_is_refused(data, tmp_path):
    """Both were once known by name alone, so a run went on with another target under the same name."""
    first = {"digest": "a", "backend": "native", "threads": 1}
    train(data, tmp_path / "drafter", stop_after=2, identity=first)
    elsewhere = {**first, "threads": 2}
    _, stopped = train(data, tmp_path / "drafter", stop_after=1, model="./tiny", identity=elsewhere)
    assert stopped.progress.step == 3
    for other in ({**first, "digest": "b"}, {**first, "backend": "reference"}):
        with pytest.raises(OptionError, match="of a target with other weights or another backend"):
            train(data, tmp_path / "drafter", identity=other)
    copied = shutil.copytree(data, tmp_path / "data")
    shutil.rmtree(copied / "validation")
    with pytest.raises(OptionError, match="with other validation texts"):
        train(copied, tmp_path / "drafter", identity=first)


def test_a_state_that_lacks_these_facts_goes_on(data, tmp_path):
    here = {**settings_of(data, tmp_path).identity, "target": {"digest": "a"}, "data": "x", "validation": None}
    older = {key: value for key, value in here.items() if key not in ("target", "validation")}
    check_identity(older, here, tmp_path)
    with pytest.raises(OptionError, match="model 'tiny', and this one has 'other'"):
        check_identity(older, {**here, "model": "other"}, tmp_path)
    check_identity(here, {**here, "model": "other"}, tmp_path)


@pytest.mark.parametrize("how", ["gone", "junk"])
@pytest.mark.parametrize("at", [None, 3])
def test_a_run_whose_best_weights_are_lost_goes_on_and_says_so(data, tmp_path, whole, how, at):
    """They were left out without a word when gone, and a good run was to begin anew when they were damaged."""
    job, trainer = train(data, tmp_path / "drafter", stop_after=at)
    best = tmp_path / "drafter.state" / "best.safetensors"
    best.unlink() if how == "gone" else best.write_bytes(b"junk" * 9)
    if at is None:
        with pytest.raises(DraftsmithError, match="gone or damaged; the same command goes on"):
            finish(job, trainer)
    told = []
    job = job_of(data, tmp_path / "drafter")
    trainer = carry_out(job, Listener(), Processes(), tell=told.append)
    assert any("best.safetensors is missing or damaged" in line for line in told)
    assert losses_of(tmp_path / "drafter") == losses_of(whole[0])
    assert finish(job, trainer)["step"] == trainer.progress.best_step > 0


def test_killed_before_the_log_was_cut_the_log_holds_each_step_once(data, tmp_path, whole):
    output, *_ = whole
    train(data, tmp_path / "drafter", stop_after=5, save_every=1e9)
    log = tmp_path / "drafter.state" / "train.jsonl"
    # Lines of steps that no state knows, and one cut in half.
    with log.open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 6, "loss": 1.0}) + '\n{"kind": "st')
    train(data, tmp_path / "drafter")
    assert losses_of(tmp_path / "drafter") == losses_of(output)


def _killed(data, output, at):
    """A run that is killed half-way through writing its state number `at`."""
    save, written = states.save_tensors, []

    def save_half(tensors, path, metadata):
        written.append(path)
        save(tensors, path, metadata)
        if len(written) == at:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    states.save_tensors = save_half
    train(data, output, validate_every=100)


def run_apart(function, *arguments):
    """In a forked process; returns its exit code."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def test_killed_while_writing_a_state_loses_one_interval(data, tmp_path, whole):
    output, *_ = whole
    mine = tmp_path / "drafter"
    assert run_apart(_killed, data, mine, 4) == -signal.SIGKILL
    _, facts = read_state(tmp_path / "drafter.state" / "last.safetensors")
    assert facts["progress"]["step"] == 3
    _, trainer = train(data, mine, validate_every=100)
    assert trainer.finished
    assert losses_of(mine) == losses_of(output)
    assert not list((tmp_path / "drafter.state").glob(".*"))


def _on_a_full_disk(data, output, queue):
    """A run whose files may not grow beyond what one state needs less a little."""
    train(data, output, stop_after=3)
    size = (output.with_name(output.name + ".state") / "last.safetensors").stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    try:
        train(data, output)
    except DraftsmithError as error:
        queue.put(str(error))


def test_a_full_disk_is_told_and_keeps_the_last_state(data, tmp_path, whole):
    output, *_ = whole
    queue = multiprocessing.get_context("fork").Queue()
    assert run_apart(_on_a_full_disk, data, tmp_path / "drafter", queue) == 0
    message = queue.get(timeout=10)
    assert "cannot be written" in message
    assert "the last good state is" in message
    assert "/." not in message  # the file as it is called while it is written is not the user's
    assert "\n" not in message
    assert not list((tmp_path / "drafter.state").glob(".*"))
    _, facts = read_state(tmp_path / "drafter.state" / "last.safetensors")
    assert facts["progress"]["step"] == 3
    train(data, tmp_path / "drafter")
    assert losses_of(tmp_path / "drafter") == losses_of(output)


def test_a_loss_that_is_not_finite_ends_the_run(data, tmp_path):
    with pytest.raises(DraftsmithError, match=r"step 3: the loss is not finite; .*last good state") as caught:
        train(data, tmp_path / "drafter", method=BROKEN)
    assert "\n" not in str(caught.value)
    tensors, facts = read_state(tmp_path / "drafter.state" / "last.safetensors")
    assert facts["progress"]["step"] == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values() if tensor.is_floating_point())


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"lr": 1e30, "validate_every": 1}, "the laws of its drafts are"), ({"lr": 1e300}, "the weights are")],
)
def test_a_rate_far_too_high_is_told(data, tmp_path, changes, what):
    """Validation met what is not finite and ended in a traceback; infinite weights went to the disk."""
    with pytest.raises(DraftsmithError, match=rf"step \d: {what} not finite; a smaller --lr"):
        train(data, tmp_path / "drafter", warmup=0.0, clip=1e9, **changes)


def test_stopped_while_features_are_kept_there_is_no_trainer(data, tmp_path):
    _, trainer = train(data, tmp_path / "drafter", stop_after=0, cache=tmp_path / "cache")
    assert trainer is None


def test_leftovers_go_before_there_is_a_state(data, tmp_path):
    state = tmp_path / "drafter.state"
    state.mkdir()
    (state / ".last.safetensors.1").touch()
    (state / ".train.jsonl.1").touch()
    train(data, tmp_path / "drafter", steps=1)
    assert not list(state.glob(".*"))


def test_a_state_is_read_back_bit_for_bit(tmp_path):
    tensors = {"weight.a": torch.randn(3, 4), "optimiser.0.step": torch.tensor(7.0), "weight.ids": torch.arange(5)}
    write_state(tmp_path / "s", tensors, {"progress": {"seconds": 0.1 + 0.2}})
    found, facts = read_state(tmp_path / "s")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert facts["progress"]["seconds"] == 0.1 + 0.2


@pytest.mark.parametrize("damage", [b"", b"junk" * 100], ids=["empty", "junk"])
def test_a_damaged_state_is_named(data, tmp_path, damage):
    train(data, tmp_path / "drafter", stop_after=2)
    (tmp_path / "drafter.state" / "last.safetensors").write_bytes(damage)
    with pytest.raises(DraftsmithError, match=r"last.safetensors: not a readable state .*--force"):
        train(data, tmp_path / "drafter")


def test_what_is_written_in_the_end(whole):
    output, job, trainer = whole
    figures = finish(job, trainer)
    assert {file.name for file in output.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
        "recipe.yaml",
        "train.jsonl",
    }
    found = read_checkpoint(output)
    assert found.method == METHOD
    assert found.about["validation"] == figures
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.tensors.values() if tensor.is_floating_point())
    card = (output / "README.md").read_text()
    assert f"{figures['greedy_tokens_per_step']:.2f} tokens per step" in card


def test_the_best_validation_is_kept(whole):
    output, _, trainer = whole
    _, best = read_state(output.with_name("drafter.state") / "best.safetensors")
    values = {line["step"]: line["greedy_tokens_per_step"] for line in log_of(output, "validation")}
    assert best["greedy_tokens_per_step"] == max(values.values())
    assert trainer.progress.best_step == min(step for step, value in values.items() if value == max(values.values()))


def test_from_a_cache_it_learns_the_same(data, tmp_path, whole):
    output, *_ = whole
    train(data, tmp_path / "drafter", cache=tmp_path / "cache")
    for (_, mine, _), (_, other, _) in zip(losses_of(tmp_path / "drafter"), losses_of(output), strict=True):
        assert mine == pytest.approx(other, rel=1e-2)


def test_bfloat16_learns_too(data, tmp_path, whole):
    output, *_ = whole
    train(data, tmp_path / "drafter", compute="bfloat16")
    mine, other = losses_of(tmp_path / "drafter"), losses_of(output)
    assert mine[0][1] == pytest.approx(other[0][1], rel=0.02)
    assert mine[-1][1] < mine[0][1]


def test_two_runs_do_not_share_a_state(data, tmp_path):
    settings = settings_of(data, tmp_path / "drafter")
    train(data, settings.output, stop_after=2)
    before = {file: file.read_bytes() for file in settings.state_dir.iterdir() if file.is_file()}
    for restart in (False, True):  # beginning anew once deleted what the other run had, its lock too
        with alone_in(settings), pytest.raises(OptionError, match="another run is at work"):
            carry_out(job_of(data, settings.output), Listener(), Processes(), tell=print, restart=restart)
    assert {file: file.read_bytes() for file in settings.state_dir.iterdir() if file.is_file()} == before
    carry_out(job_of(data, settings.output, steps=1), Listener(), Processes(), tell=print, restart=True)
    assert [step for step, *_ in losses_of(settings.output)] == [1]


def test_the_module_is_judged_without_its_noise(data, tmp_path):
    """EAGLE-1 learns with noise on its features; validation must not see it, and training goes on with it."""
    job = job_of(data, tmp_path / "drafter")
    seen = []
    depths = job.module.depths
    job.module.depths = lambda batch, num: (seen.append(job.module.training), depths(batch, num))[1]
    carry_out(job, Listener(), Processes(), tell=lambda line: None)
    assert set(seen) == {True, False}
    assert job.module.training
