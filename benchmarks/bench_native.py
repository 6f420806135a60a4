"""This package beside llama.cpp (and OpenVINO GenAI) on the same files, interleaved in one run.

Peers live in an environment of their own (`benchmarks/peers/README.md`) and are driven as worker processes;
without `--peer-python` only this package is measured. Sections: plain decoding, T(m) for m rows at once, reading
a prompt, a batch of 8, quality against float32 (needs `--text`) and speculation (needs `--prompts`).
Ratios are of speeds, above 1 where this package is faster; progress goes to standard error.

    python benchmarks/bench_native.py --peer-python PEERS/bin/python --model smollm2 \\
        --peer-file SmolLM2.Q4_0.gguf --text QUESTIONS.jsonl --prompts QUESTIONS.jsonl
    python benchmarks/bench_native.py --quick            (a short try)
    python benchmarks/bench_native.py plain rows         (some sections)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import native_speed as speed
from native_arms import Arm, OpenVinoArm, OwnArm, PeerArm
from native_quality import quality, read_text
from native_speculation import Question, Way, speculation

from draftsmith.bench.demo_prompts import DEMO_PROMPTS
from draftsmith.bench.environment import MachineLoad, hardware, versions
from draftsmith.bench.prompts import load_prompts
from draftsmith.engine.prompts import encode_prompt
from draftsmith.io.catalogue import resolve

COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
STORY = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper and a ship that came at night."}]
CONTEXT = 256


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; all where none is named")
    parser.add_argument("--model", default="smollm2", help="a catalogue name or a GGUF file")
    parser.add_argument("--backend", default="auto", help="this package's backend")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", help="Python of the environment that llama-cpp-python is installed in")
    parser.add_argument("--peer-file", type=Path, action="append", default=[], help="llama.cpp also on this file")
    parser.add_argument("--peer-log", type=Path, help="what the workers' libraries print")
    parser.add_argument("--openvino", action="store_true", help="OpenVINO GenAI too, from the same environment")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of plain decoding")
    parser.add_argument("--text", type=Path, help="text, or prompts in JSON lines, for quality")
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=256, help="tokens read on their own in quality, at most 512")
    parser.add_argument("--prompts", type=Path, help="questions in JSON lines, for speculation")
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128, help="most tokens per question")
    parser.add_argument("--drafters", default="ngram,suffix,hybrid", help="comma-separated selections")
    parser.add_argument("--peer-drafts", default="lookup:2,lookup:10,api:2,api:10", help="how llama.cpp drafts")
    parser.add_argument("--quick", action="store_true", help="few repeats, tokens and prompts")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"unknown section {name!r}; known are {', '.join(SECTIONS)}")
    if options.quick:
        options.repeats, options.tokens, options.text_tokens = 2, 32, 512
        options.per_category, options.new_tokens = 1, 24
    return options


class Bench:
    """The arms of a run and what the sections feed them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        speed.say(f"loading {options.model}")
        self.own = OwnArm.open(options.model, backend=options.backend, threads=options.threads)
        self.arms: list[Arm] = [self.own]
        self.peers: list[PeerArm] = []
        if options.peer_python:
            same = resolve(options.model)
            for path in (same, *options.peer_file):
                self._add(PeerArm, "llama.cpp", "llama_cpp_worker.py", path, is_same=path == same)
            if options.openvino:
                self._add(OpenVinoArm, "OpenVINO", "openvino_worker.py", same, is_same=True)
        text = "\n\n".join(prompt.task for prompt in DEMO_PROMPTS)
        self._material: list[int] = self.own.model.tokenizer.encode(text, special=False)

    def _add(self, kind: type[PeerArm], name: str, worker: str, path: Path, *, is_same: bool) -> None:
        name = name if is_same else f"{name} {path.stem.rpartition('.')[2]}"
        speed.say(f"loading {path.name} into {name}")
        options = self.options
        # Room for a prompt and its answer, and for the context of T(m) with its rows.
        settings: dict[str, Any] = {"threads": options.threads, "n_ctx": 2048, "log": options.peer_log}
        arm = kind(name, worker, options.peer_python, path, **settings)
        self.peers.append(arm)
        self.arms.append(arm)

    def ids(self, count: int, start: int = 0) -> list[int]:
        """`count` tokens of ordinary text."""
        text = self._material
        return [text[(start + place) % len(text)] for place in range(count)]

    def encode(self, prompt: Any) -> list[int]:
        """A prompt's ids, chat template applied."""
        return encode_prompt(prompt, self.own.model)

    def close(self) -> None:
        """End the peers."""
        for arm in self.arms:
            arm.close()


def run_plain(bench: Bench) -> dict[str, Any]:
    """Plain decoding."""
    return speed.plain(bench.arms, bench.encode(STORY), bench.options.tokens, bench.options.repeats)


def run_rows(bench: Bench) -> dict[str, Any]:
    """T(m)."""
    counts = (1, 4, 16, 64) if bench.options.quick else COUNTS
    tries = 3 if bench.options.quick else 5
    return speed.rows(
        bench.arms, bench.ids(CONTEXT), bench.ids(max(counts), CONTEXT), counts, bench.options.repeats, tries
    )


def run_prefill(bench: Bench) -> dict[str, Any]:
    """Reading a prompt of 512 tokens."""
    return speed.prefill(bench.arms, bench.ids(512), bench.options.repeats)


def run_batch(bench: Bench) -> dict[str, Any]:
    """Eight sequences together."""
    prompts = [bench.ids(32, 37 * place) for place in range(8)]
    return speed.batch(bench.arms, prompts, max(16, bench.options.tokens // 4), bench.options.repeats)


def run_quality(bench: Bench) -> dict[str, Any] | None:
    """KL divergence and perplexity; None without a text."""
    options = bench.options
    if options.text is None:
        return None
    ids = bench.own.model.tokenizer.encode(read_text(options.text), special=False)
    reference = OwnArm.open(options.model, backend="reference", threads=options.threads, name="reference float32")
    try:
        return quality(bench.arms, reference, ids, options.text_tokens, options.chunk)
    finally:
        reference.close()


def run_speculation(bench: Bench) -> dict[str, Any] | None:
    """Drafters and prompt lookup; None without prompts."""
    options = bench.options
    if options.prompts is None:
        return None
    prompts = load_prompts(options.prompts, per_category=options.per_category, limit=4 if options.quick else None)
    questions = [
        Question(category=prompt.category, ids=bench.encode([{"role": "user", "content": prompt.text}]))
        for prompt in prompts
    ]
    ways = [Way(bench.own, draft) for draft in ("none", *options.drafters.split(","))]
    for arm in bench.peers:
        drafts = options.peer_drafts.split(",")
        if isinstance(arm, OpenVinoArm):
            drafts = [draft for draft in drafts if draft.startswith("lookup")]
        ways += [Way(arm, draft) for draft in ("none", *drafts)]
    return speculation(ways, questions, options.new_tokens, sorted(bench.own.model.eos_ids))


SECTIONS: dict[str, Callable[[Bench], dict[str, Any] | None]] = {
    "plain": run_plain,
    "rows": run_rows,
    "prefill": run_prefill,
    "batch": run_batch,
    "quality": run_quality,
    "speculation": run_speculation,
}


def show(name: str, result: dict[str, Any]) -> None:
    """Print a section's table."""
    cores = result["other_cores"]
    company = "" if cores is None else f" (other work kept {cores:.2f} cores busy)"
    print(f"\n{name}{company}\n" + "\n".join(result["table"]), flush=True)


def main() -> None:
    """Run the sections and print what they found."""
    options = parse(sys.argv[1:])
    bench = Bench(options)
    found: dict[str, Any] = {
        "hardware": hardware(options.threads),
        "versions": versions(),
        "load_before": os.getloadavg(),
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "peers": {arm.name: arm.description for arm in bench.peers},
    }
    found["options"]["peer_file"] = [path.name for path in options.peer_file]
    if not options.json:
        hardware_found = found["hardware"]
        print(f"{hardware_found['processor']}, {options.threads} threads, load {found['load_before'][0]:.1f}")
        for name, description in found["peers"].items():
            print(f"{name}: {description}")
    try:
        for name in options.sections or SECTIONS:
            speed.say(name)
            load = MachineLoad(lambda: [arm.process_id for arm in bench.peers])
            result = found[name] = SECTIONS[name](bench)
            if result is not None:
                result["other_cores"] = load.others()
                if not options.json:
                    show(name, result)
    finally:
        bench.close()
    if options.json:
        print(json.dumps(found, indent=1, default=list))


if __name__ == "__main__":
    main()
