"""The log of a run: TensorBoard's events beside it, and a full disk in one line."""

import multiprocessing
import resource
import signal

import pytest

from draftsmith.errors import DraftsmithError
from draftsmith.training.logs import TrainingLog
from draftsmith.training.trainer import StepReport

pytest.importorskip("tensorboard")


def report(step):
    return StepReport(
        step=step, loss=1.5, accuracy=(), overlap=(), rows=1, tokens=1, gradient=0.5, rate=0.25, seconds=0.1,
        feature_seconds=0.0,
    )  # fmt: skip


def test_tensorboard_reads_the_events(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps in ((0, (1, 2, 3)), (2, (3, 4))):  # the second life knows two steps of the first
        log = TrainingLog(tmp_path / "train.jsonl", first)
        for step in steps:
            log.step(report(step))
        log.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4]
    assert {event.value for event in found.Scalars("rate")} == {0.25}


def _on_a_full_disk(path, queue):
    log = TrainingLog(path, 0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
    try:
        for step in range(100):
            log._show(step, {"loss": 1.0})
    except DraftsmithError as error:
        queue.put(str(error))
    log.close()


def test_a_full_disk_is_one_line(tmp_path, capfd):
    """TensorBoard's own writer told it by a traceback of its thread."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_on_a_full_disk, args=(tmp_path / "train.jsonl", queue))
    process.start()
    assert str(tmp_path / "tensorboard") in queue.get(timeout=30)
    process.join()
    assert process.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_line_that_was_not_written_is_told_once(tmp_path, monkeypatch):
    log = TrainingLog(tmp_path / "train.jsonl", 0)
    log._file.close()
    log._file = open("/dev/full", "w", encoding="utf-8")
    with pytest.raises(DraftsmithError, match=r"train\.jsonl: cannot be written \(No space left on device\)"):
        log.write("start")
    log.close()
