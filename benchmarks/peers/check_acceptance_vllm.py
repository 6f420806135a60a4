"""The part of `check_acceptance.py` that runs with vLLM's own Python: answers prompts with EAGLE-3, prints counters."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams


def main() -> None:
    model, drafter, prompts, num_draft, max_tokens = sys.argv[1:]
    engine = LLM(
        model=model,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": int(num_draft)},
    )
    found, seen = [], (0, [0] * int(num_draft))
    for text in json.loads(Path(prompts).read_text()):
        settings = SamplingParams(temperature=0.0, max_tokens=int(max_tokens))
        outputs = engine.chat([{"role": "user", "content": text}], settings, use_tqdm=False)
        counters = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
        now = (counters["drafts"].value, list(counters["accepted_tokens_per_pos"].values))
        accepted = [after - before for after, before in zip(now[1], seen[1], strict=True)]
        found.append(
            {"drafts": now[0] - seen[0], "accepted": accepted, "answer": list(outputs[0].outputs[0].token_ids)}
        )
        seen = now
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
