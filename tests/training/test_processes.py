"""Two processes give the losses of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftsmith.errors import OptionError
from draftsmith.training.processes import Processes
from tests.training.test_trainer import losses_of, train
from tests.training.tiny import job_of

ROOT = Path(__file__).parents[2]


def together(data, output, accumulate, *more, count=2):
    """A run of several processes under torchrun."""
    script = Path(__file__).with_name("one_of_several.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*launch, str(script), str(data), str(output), str(accumulate), *map(str, more)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        check=False,
    )


def test_two_processes_give_the_losses_of_one(data, tmp_path):
    done = together(data, tmp_path / "two", 4)
    assert done.returncode == 0, done.stderr
    train(data, tmp_path / "one", accumulate=4)
    mine, other = losses_of(tmp_path / "two"), losses_of(tmp_path / "one")
    assert len(mine) == len(other) == 8
    for (_, loss, gradient), (_, expected, norm) in zip(mine, other, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert gradient == pytest.approx(norm, rel=1e-4)


def test_a_cache_is_filled_by_all_of_them(data, tmp_path):
    """Each scores its share, and what they train on is what one process caches by itself."""
    done = together(data, tmp_path / "two", 2, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    shards = sorted(path.name for path in (tmp_path / "cache").glob("*.safetensors"))
    assert len(shards) > 2
    train(data, tmp_path / "one", accumulate=2, cache=tmp_path / "own")
    mine, other = losses_of(tmp_path / "two"), losses_of(tmp_path / "one")
    assert len(mine) == len(other) == 8
    for (_, loss, _), (_, expected, _) in zip(mine, other, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5)


def test_forwards_must_be_shared_evenly(data, tmp_path):
    with pytest.raises(OptionError, match="accumulate is 3; 2 processes need a multiple of 2"):
        job_of(data, tmp_path / "out", together=Processes(rank=0, count=2), accumulate=3)
