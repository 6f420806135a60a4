"""What scoring m rows costs in the reference backend, and what each way of laying out weights costs.

Run: `python benchmarks/bench_reference.py [--threads 2] [--rows 1,2,4,8,16] [--repeats 20]`. Shapes are
SmolLM2-135M's with random weights (time does not depend on the values). All arms of a table run
interleaved in one process; a figure is the sum of the per-matrix minima (or the minimum and the median
over whole steps), which other load on the machine disturbs least. With one thread, times are the
thread's own processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from draftsmith.models.backend import RowGroup
from draftsmith.models.linear import PACKED_ROWS, BlockedLinear, can_pack
from draftsmith.models.reference import ReferenceBackend
from draftsmith.models.spec import DecoderSpec

CONFIG = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49_152, 576)]
"""Output and input size of every matrix of one forward, in order."""

Product = Callable[[torch.Tensor], torch.Tensor]


def row_major(weight: torch.Tensor) -> Product:
    return lambda rows: F.linear(rows, weight)


def column_major(weight: torch.Tensor) -> Product:
    turned = weight.t().contiguous()
    return lambda rows: torch.mm(rows, turned)


def packed(weight: torch.Tensor) -> Product:
    blob = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, blob, None, "none", [], "")


def blocked(weight: torch.Tensor) -> Product:
    return BlockedLinear(weight, None)


LAYOUTS: dict[str, Callable[[torch.Tensor], Product]] = {
    "row-major (F.linear)": row_major,
    "column-major": column_major,
    "oneDNN packed": packed,
    "blocks of 48 (ours)": blocked,
}


def clock_for(threads: int) -> Callable[[], float]:
    return time.thread_time if threads == 1 else time.perf_counter


def time_layouts(row_counts: Sequence[int], repeats: int, clock: Callable[[], float]) -> None:
    """Milliseconds for all matrices of one forward, per layout and number of rows."""
    weights = [torch.randn(shape) * 0.02 for shape in SHAPES]
    names = [name for name in LAYOUTS if name != "oneDNN packed" or can_pack()]
    layouts = {name: [LAYOUTS[name](weight) for weight in weights] for name in names}
    print(f"{'linears only, ms':24}" + "".join(f"{'m=' + str(count):>9}" for count in row_counts))
    best = {name: [[float("inf")] * len(weights) for _ in row_counts] for name in names}
    for column, count in enumerate(row_counts):
        inputs = [torch.randn(count, weight.shape[1]) for weight in weights]
        # Long prompts take long, and vary little.
        for _ in range(repeats if count <= 64 else 3):
            for name in names:
                minima = best[name][column]
                for index, (product, rows) in enumerate(zip(layouts[name], inputs, strict=True)):
                    start = clock()
                    product(rows)
                    minima[index] = min(minima[index], clock() - start)
    for name in names:
        print(f"{name:24}" + "".join(f"{1e3 * sum(minima):9.1f}" for minima in best[name]))


def random_backend(dtype: torch.dtype) -> ReferenceBackend:
    sizes = {"embed_tokens": (49_152, 576), "q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576)}
    sizes |= {"o_proj": (576, 576), "gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}

    def load(name: str) -> torch.Tensor:
        shape = next((size for part, size in sizes.items() if part in name), None)
        return torch.ones(576) if shape is None else torch.randn(shape) * 0.02

    return ReferenceBackend.from_weights(DecoderSpec.from_config(CONFIG), load, dtype=dtype)


def fill(backend: ReferenceBackend, sequence_id: int, length: int) -> None:
    backend.cache.open(sequence_id)
    while (rows := min(512, length - backend.cache.committed(sequence_id))) > 0:
        backend.cache.reserve(sequence_id, rows)
        backend.score([RowGroup(sequence_id, [1] * rows, range(-1, rows - 1), rows)])
        backend.cache.keep(sequence_id, range(rows))


def step(backend: ReferenceBackend, sequence_ids: Sequence[int], num_rows: int) -> None:
    """Score a chain of `num_rows` rows of each sequence, logits for all, and reject everything."""
    for sequence_id in sequence_ids:
        backend.cache.reserve(sequence_id, num_rows)
    groups = [RowGroup(sequence_id, [1] * num_rows, range(-1, num_rows - 1), 0) for sequence_id in sequence_ids]
    backend.score(groups)
    for sequence_id in sequence_ids:
        backend.cache.keep(sequence_id, ())


def time_steps(
    dtype: torch.dtype, row_counts: Sequence[int], contexts: Sequence[int], repeats: int, clock: Callable[[], float]
) -> None:
    """Milliseconds of one whole step: minimum / median, per context and number of rows."""
    backend = random_backend(dtype)
    name = str(dtype).removeprefix("torch.")
    for sequence_id, context in enumerate(contexts):
        fill(backend, sequence_id, context)
    cells: dict[tuple[int, int], list[float]] = {(s, m): [] for s in range(len(contexts)) for m in row_counts}
    for _ in range(repeats):
        for (sequence_id, count), seconds in cells.items():
            start = clock()
            step(backend, [sequence_id], count)
            seconds.append(clock() - start)
    print(f"\n{'whole step, ' + name + ', ms':24}" + "".join(f"{'m=' + str(count):>14}" for count in row_counts))
    for sequence_id, context in enumerate(contexts):
        row = [cells[sequence_id, count] for count in row_counts]
        text = "".join(f"{1e3 * min(item):7.1f}/{1e3 * statistics.median(item):6.1f}" for item in row)
        print(f"{'context ' + str(context):24}{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,2,3,4,6,8,12,16,32,512")
    parser.add_argument("--contexts", default="128,1024")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    row_counts = [int(part) for part in options.rows.split(",")]
    few = [count for count in row_counts if count <= 64]
    contexts = [int(part) for part in options.contexts.split(",")]
    clock = clock_for(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, {torch.backends.cpu.get_cpu_capability()}\n")
    with torch.inference_mode():
        time_layouts(row_counts, options.repeats, clock)
    for dtype in (torch.float32, torch.bfloat16):
        time_steps(dtype, few, contexts, options.repeats, clock)


if __name__ == "__main__":
    main()
