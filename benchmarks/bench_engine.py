"""What a step costs outside target, drafter and sampling, at batch 1 and per further sequence.

The target is a tiny random decoder with SmolLM2's vocabulary (49,152), so that everything the engine
does per step is real (views, cache.keep, stop rules, text, event log) and little else is in the way. Drafts are
right most of the time (an oracle replaying the plain run, every fifth token wrong): six per step under the
fixed controller, what pays under `auto`.
Prints one row per setting: medians over steps of the parts of the event log.

    python benchmarks/bench_engine.py [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from draftsmith.engine.engine import Engine, EngineSettings
from tests.engine import fakes
from tests.models.fakes import tiny_backend

VOCAB = 49152
NUM_TOKENS = 200
ORACLE = "tests.engine.fakes:OracleDrafter:wrong_every=5"
ARMS = [("none", "fixed"), (ORACLE, "fixed:num_draft=6"), (ORACLE, "auto")]
SAMPLINGS = {
    "greedy": {},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "temperature 1": {"temperature": 1.0, "seed": 1},
}


def make_engine(batch: int, controller: str) -> Engine:
    """An engine over the tiny target with a real tokenizer."""
    tokenizer = load_model_tokenizer()
    model = fakes.LoadedModel(
        name="tiny",
        backend_name="reference",
        backend=tiny_backend(0, dtype=torch.float32, vocab_size=VOCAB),
        tokenizer=tokenizer,
        chat=None,
        eos_ids=frozenset(),
    )
    settings = EngineSettings(
        drafter="none", controller=controller, max_batch=batch, memory_bytes=1 << 30, prefix_cache=False
    )
    return Engine(model, settings)


def load_model_tokenizer():
    """SmolLM2's tokenizer: text costs what it costs in real use."""
    from draftsmith.io.files import open_model
    from draftsmith.models.tokenizer import Tokenizer

    return Tokenizer.from_data(open_model("smollm2").tokenizer)


def measure(batch: int, drafter: str, controller: str, params: dict[str, float]) -> dict[str, float]:
    """Median microseconds per step of full batches."""
    engine = make_engine(batch, controller)
    prompts = [[100 + i] * 8 for i in range(batch)]
    fakes.OracleDrafter.known = [
        prompt + list(result.token_ids) + [1] * 8
        for prompt, result in zip(prompts, engine.generate(prompts, max_new_tokens=NUM_TOKENS, **params), strict=True)
    ]
    engine.take_events()
    engine.generate(prompts, max_new_tokens=NUM_TOKENS, drafter=drafter, **params)
    log = engine.take_events()
    prompt_steps = {record.step for record in log.requests if record.prompt}
    steps = [record for record in log.steps if record.step not in prompt_steps and record.requests == batch]
    emitted = [record.emitted for record in log.requests if not record.prompt]
    return {
        "steps": len(steps),
        "tokens_per_step": statistics.mean(emitted),
        **{
            part: statistics.median(getattr(record, f"{part}_seconds") for record in steps) * 1e6
            for part in ("draft", "verify", "sample", "other")
        },
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for sampling, params in SAMPLINGS.items():
        for drafter, controller in ARMS:
            alone = None
            for batch in (1, 8):
                row = measure(batch, drafter, controller, params)
                alone = alone or row["other"]
                extra = (row["other"] - alone) / (batch - 1) if batch > 1 else 0.0
                rows.append(
                    {
                        "sampling": sampling,
                        "drafts": "none" if drafter == "none" else controller.split(":")[0],
                        "batch": batch,
                        **row,
                        "extra": extra,
                    }
                )
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'sampling':28} {'drafts':8} batch tok/step  draft_us sample_us  other_us  other per extra sequence_us")
    for row in rows:
        print(
            f"{row['sampling']:28} {row['drafts']:8} {row['batch']:5} {row['tokens_per_step']:8.2f} "
            f"{row['draft']:9.0f} {row['sample']:9.0f} {row['other']:9.0f} {row['extra']:9.0f}"
        )


if __name__ == "__main__":
    main()
