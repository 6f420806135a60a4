"""Whether vLLM's whole engine accepts of an exported drafter what ours accepts of the original.

    python benchmarks/peers/check_acceptance.py --vllm VLLM/bin/python --model DIRECTORY [--work DIR]

Trains an EAGLE-3 drafter on a model's own answers to three prompts until it knows them by heart, so that nearly every
draft is right in an engine that reads it right, exports it, and has both engines answer the same prompts greedily.
Then once more with a draft vocabulary that is off by one. `check_dialects.py` compares logits; this compares engines.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftsmith.cli.convert_check import PROMPTS, written_texts
from draftsmith.cli.train import target_info
from draftsmith.core.stats import summarise
from draftsmith.dialects.convert import export, read_native, write_export
from draftsmith.dialects.dialect import Choices, Target
from draftsmith.dialects.table import dialect_named
from draftsmith.drafters.checkpoint import module_class, save_module
from draftsmith.drafters.trainable import frequent_ids
from draftsmith.engine.engine import Engine, EngineSettings
from draftsmith.engine.loading import LoadedModel, load_model
from draftsmith.io.files import open_model
from draftsmith.training.features import TargetScorer, collate

NUM_DRAFT, ANSWER_TOKENS, DRAFT_VOCABULARY = 3, 40, 2048


def learn_by_heart(loaded: LoadedModel, model: str, path: Path, steps: int) -> None:
    """A drafter that knows the model's answers."""
    info = target_info(loaded, load_model)
    texts = written_texts(loaded)
    tokens = torch.cat([text.tokens for text in texts])
    counts = torch.bincount(tokens, minlength=info.vocab_size)
    ids = frequent_ids(counts, DRAFT_VOCABULARY, always=sorted(info.eos_ids))
    kind = module_class("eagle3")
    module = kind(kind.configure(info, {}), info, ids)
    module.initialise(info, torch.Generator().manual_seed(0))
    batch = collate(texts, TargetScorer(loaded.backend, module.needs).score(texts))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = module.loss(batch, module.loss_defaults).loss
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    save_module(path, "eagle3", module.eval(), model, info, {})


def ours(loaded: LoadedModel, path: Path) -> list[dict[str, Any]]:
    """What our engine accepts, prompt by prompt."""
    drafter = f"eagle3:path={path}:max_draft={NUM_DRAFT}"
    settings = EngineSettings(
        drafter=drafter, controller=f"fixed:num_draft={NUM_DRAFT}", max_batch=1, prefix_cache=False
    )
    engine = Engine(loaded, settings)
    results = []
    for prompt in PROMPTS:
        answer = engine.generate([{"role": "user", "content": prompt}], max_new_tokens=ANSWER_TOKENS).token_ids
        found = summarise(engine.take_events())
        results.append({"drafts": found.drafts, "accepted": list(found.successes), "answer": list(answer)})
    return results


def theirs(python: str, model: str, export_path: Path, work: Path) -> list[dict[str, Any]]:
    """What vLLM's accepts."""
    prompts = work / "prompts.json"
    prompts.write_text(json.dumps(list(PROMPTS)))
    script = Path(__file__).with_name("check_acceptance_vllm.py")
    command = [python, str(script), model, str(export_path), str(prompts), str(NUM_DRAFT), str(ANSWER_TOKENS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"vLLM ended without a result (exit code {done.returncode})\n{done.stdout[-2000:]}")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="vLLM's Python")
    parser.add_argument("--model", required=True, help="a directory that both engines read")
    parser.add_argument("--work", type=Path, help="where files are written (a temporary directory)")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        loaded = load_model(options.model, backend="reference", dtype="bfloat16")
        native = work / "native"
        if not native.exists():
            learn_by_heart(loaded, options.model, native, options.steps)
        files = open_model(options.model)
        target = Target(name=options.model, spec=loaded.backend.spec, files=files)
        exported = export(read_native(native, target), dialect_named("eagle3"), target, Choices(layer_ids="applied"))
        write_export(exported, work / "export")
        results = {
            "draftsmith": ours(loaded, native),
            "vLLM": theirs(options.vllm, options.model, work / "export", work),
        }
        faulty = {**exported.tensors, "d2t": exported.tensors["d2t"] + (torch.arange(DRAFT_VOCABULARY) > 5)}
        write_export(dataclasses.replace(exported, tensors=faulty), work / "fault")
        results["vLLM, d2t off by one"] = theirs(options.vllm, options.model, work / "fault", work)
    # Answers may part at near ties of bfloat16, and what was learnt by heart is worth nothing then.
    same = [
        place for place in range(len(PROMPTS)) if len({str(each[place]["answer"]) for each in results.values()}) == 1
    ]
    print(f"{len(same)} of {len(PROMPTS)} answers have the same ids in all runs; these count")
    tokens = {}
    for name, found in results.items():
        drafts = sum(found[place]["drafts"] for place in same)
        accepted = [sum(found[place]["accepted"][depth] for place in same) for depth in range(NUM_DRAFT)]
        tokens[name] = 1 + sum(accepted) / max(1, drafts)
        print(f"{name:22} {drafts:4} drafts, accepted by position {accepted}, {tokens[name]:.2f} tokens per draft")
    agree = bool(same) and abs(tokens["draftsmith"] - tokens["vLLM"]) < 0.3 and tokens["draftsmith"] > 2.5
    sys.exit(0 if agree and tokens["vLLM, d2t off by one"] < 1.5 else 1)


if __name__ == "__main__":
    main()
