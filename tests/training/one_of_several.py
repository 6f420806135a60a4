"""What each process of a run of several does, under torchrun. Arguments: data, output, forwards of a step, cache."""

import sys
from pathlib import Path

import torch

from draftsmith.training import feature_cache
from draftsmith.training.processes import processes
from draftsmith.training.run import carry_out
from draftsmith.training.trainer import Listener
from tests.training.tiny import job_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    data, output, accumulate = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    cache = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    feature_cache.SHARD_TOKENS = 60  # several shards of a tiny corpus
    with processes() as together:
        job = job_of(data, output, together=together, accumulate=accumulate, cache=cache)
        trainer = carry_out(job, Listener(), together, tell=lambda line: None)
        # Every process must end with the weights of the first.
        total = sum(float(parameter.double().abs().sum()) for parameter in trainer.module.parameters())
        assert together.mean(total) == total
