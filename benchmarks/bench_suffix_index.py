"""The suffix index against its pure Python twin and against arctic-inference's C++ one, on repetitive traffic.

Fills a global tree with NUM_TOKENS response tokens, then replays further requests token by token: each step
commits one token and proposes a draft, all indexes in turn within the same step. Prints medians and 99th
percentiles per token, build time, bytes per token (own accounting, and growth of a fresh process's resident
memory), and how many drafts equal the peer's for the same settings. The peer is compared when it can be
imported: `pip install --no-deps --target DIR arctic-inference==0.3.0`, then `--peer DIR`.

Usage: python benchmarks/bench_suffix_index.py [--tokens N] [--replay N] [--peer DIR] [--python-tokens N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from repetitive_tokens import TokenRequest, traffic

from draftsmith.drafters.suffix_index import PythonSuffixIndex, SuffixIndex, open_index

MAX_DEPTH = 64
MAX_TOKENS = 16
MIN_PROB = 0.1
Drafted = Any
"""A draft in the arm's own form."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One index under test behind the calls of a step."""

    name: str
    start: Callable[[int, list[int]], None]
    extend: Callable[[int, list[int]], None]
    propose: Callable[[int, list[int], bool], Drafted]
    stop: Callable[[int], None]


def own_arm(name: str, index: SuffixIndex) -> Arm:
    """Draftsmith's index as an arm."""

    def propose(request: int, text: list[int], tree: bool) -> Drafted:
        return index.speculate(request, MAX_TOKENS, 1.0, 0.0, MIN_PROB, tree)

    return Arm(
        name=name, start=index.start_request, extend=index.extend_request, propose=propose, stop=index.stop_request
    )


def peer_arm(cache: Any) -> Arm:
    """arctic-inference's SuffixDecodingCache as an arm; it takes the text to match from its caller."""

    def propose(request: int, text: list[int], tree: bool) -> Drafted:
        return cache.speculate(request, text, MAX_TOKENS, 1.0, 0.0, MIN_PROB, tree)

    return Arm(
        name="peer",
        start=cache.start_request,
        extend=cache.add_active_response,
        propose=propose,
        stop=cache.stop_request,
    )


def fill(arm: Arm, requests: list[TokenRequest]) -> None:
    """Put the responses into the global tree (the prompts do not matter to it)."""
    for request_id, request in enumerate(requests):
        arm.start(request_id, [])
        arm.extend(request_id, request.response)
        arm.stop(request_id)


def build(kind: str, requests: list[TokenRequest]) -> tuple[float, Any]:
    """Seconds to build the global tree alone in bulk, and what was built (to be kept alive)."""
    if kind == "peer":
        from arctic_inference.suffix_decoding._C import SuffixTree

        arrays = [np.asarray(request.response, dtype=np.int32) for request in requests]
        tree = SuffixTree(MAX_DEPTH)
        start = time.perf_counter()
        for key, array in enumerate(arrays):
            tree.extend_ndarray(key, array)
        return time.perf_counter() - start, tree
    index = PythonSuffixIndex(MAX_DEPTH) if kind == "python" else open_index(MAX_DEPTH)
    lengths = [len(request.response) for request in requests]
    data = np.concatenate([np.asarray(request.response, dtype="<i4") for request in requests]).tobytes()
    start = time.perf_counter()
    index.add_sequences(lengths, data)
    return time.perf_counter() - start, index


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_build(kind: str, num_tokens: int) -> dict[str, float]:
    """Build in this (fresh) process: microseconds and bytes per token."""
    requests = list(traffic(num_tokens))
    build(kind, requests[:50])
    gc.collect()
    before = resident_bytes()
    seconds, built = build(kind, requests)
    grown = resident_bytes() - before
    own = built.estimate_memory() if kind == "peer" else built.memory_bytes
    return {
        "build_us_per_token": 1e6 * seconds / num_tokens,
        "resident_bytes_per_token": grown / num_tokens,
        "accounted_bytes_per_token": own / num_tokens,
    }


def replay(arms: list[Arm], requests: list[TokenRequest], num_steps: int, tree: bool) -> dict[str, Any]:
    """Token by token through new requests, the arms in turn; times in microseconds and equal drafts."""
    times: dict[str, dict[str, list[int]]] = {arm.name: {"commit": [], "propose": []} for arm in arms}
    same = ties = drafted = 0
    clock = time.perf_counter_ns
    steps = 0
    for number, request in enumerate(requests):
        request_id = 10_000_000 + number
        text = list(request.prompt)
        for arm in arms:
            arm.start(request_id, text)
        for token in request.response:
            text.append(token)
            fresh = [token]
            window = text[-MAX_DEPTH:]
            drafts = {}
            # The order changes from step to step, so that no arm always meets a warm cache.
            for arm in arms if steps % 2 else reversed(arms):
                begin = clock()
                arm.extend(request_id, fresh)
                middle = clock()
                drafts[arm.name] = arm.propose(request_id, window, tree)
                end = clock()
                times[arm.name]["commit"].append(middle - begin)
                times[arm.name]["propose"].append(end - middle)
            steps += 1
            if "peer" in drafts:
                ours, peer = drafts[arms[0].name], drafts["peer"]
                drafted += len(ours.tokens) > 0
                is_same = list(ours.tokens) == peer.token_ids and list(ours.parents) == peer.parents
                is_tie = not is_same and abs(ours.score - peer.score) <= 1e-5 * max(1.0, peer.score)
                same += is_same
                ties += is_tie
            if "python" in drafts and drafts["python"] != drafts["native"]:
                raise AssertionError(f"native and Python drafts differ: {drafts}")
            if steps == num_steps:
                break
        for arm in arms:
            arm.stop(request_id)
        if steps == num_steps:
            break
    result: dict[str, Any] = {"steps": steps, "arms": {name: summarise(parts) for name, parts in times.items()}}
    if any(arm.name == "peer" for arm in arms):
        result |= {
            "steps_with_draft": drafted,
            "same_draft": same / steps,
            "same_score_other_tokens": ties / steps,
            "other_score": 1 - (same + ties) / steps,
        }
    return result


def summarise(parts: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Median and 99th percentile, microseconds."""
    columns = {name: np.asarray(values) / 1e3 for name, values in parts.items()}
    columns["total"] = columns["commit"] + columns["propose"]
    return {
        name: {
            "median": float(np.median(values)),
            "p99": float(np.percentile(values, 99)),
            "mean": float(values.mean()),
        }
        for name, values in columns.items()
    }


def in_fresh_process(kind: str, num_tokens: int, peer: str | None) -> dict[str, float]:
    """`measure_build` in a process of its own, so that its resident memory is its own."""
    command = [sys.executable, __file__, "--child", kind, "--tokens", str(num_tokens)]
    command += ["--peer", peer] if peer else []
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def find_peer(directory: str | None) -> bool:
    """Make the peer importable from `directory`; whether it is there."""
    if directory:
        sys.path.append(directory)
    try:
        import arctic_inference.suffix_decoding  # noqa: F401
    except ImportError:
        return False
    return True


def report(results: dict[str, Any]) -> None:
    """Print the results as two tables."""
    print(f"{'index':8} {'build us/token':>15} {'resident B/token':>17} {'accounted B/token':>18}")
    for name, row in results["build"].items():
        print(
            f"{name:8} {row['build_us_per_token']:15.2f} {row['resident_bytes_per_token']:17.1f}"
            f" {row['accounted_bytes_per_token']:18.1f}   ({row['num_tokens']} tokens)"
        )
    for mode, outcome in results["replay"].items():
        print(f"\n{mode}: {outcome['steps']} steps on {outcome['global_tokens']} cached tokens, microseconds per token")
        print(f"{'index':8} {'commit':>18} {'propose':>18} {'commit + propose':>20}   (median / 99th percentile)")
        for name, row in outcome["arms"].items():
            cells = [f"{row[part]['median']:.2f} / {row[part]['p99']:.1f}" for part in ("commit", "propose", "total")]
            print(f"{name:8} {cells[0]:>18} {cells[1]:>18} {cells[2]:>20}")
        if "same_draft" in outcome:
            print(
                f"the peer's draft in {outcome['same_draft']:.2%} of the steps, one of equal score in"
                f" {outcome['same_score_other_tokens']:.2%}, of another score in {outcome['other_score']:.2%}"
            )


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="benchmark of the suffix index")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens in the global tree")
    parser.add_argument("--replay", type=int, default=20_000, help="steps to replay")
    parser.add_argument("--python-tokens", type=int, default=50_000, help="tokens for the Python index (it is slow)")
    parser.add_argument("--peer", help="directory that holds arctic-inference")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--child", choices=["native", "python", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    with_peer = find_peer(options.peer)
    if options.child:
        print(json.dumps(measure_build(options.child, options.tokens)))
        return 0
    if not open_index().is_native:
        print("the native index is not built: nothing to compare", file=sys.stderr)
        return 2
    results: dict[str, Any] = {
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()},
        "build": {},
        "replay": {},
    }
    sizes = (
        {"native": options.tokens} | ({"peer": options.tokens} if with_peer else {}) | {"python": options.python_tokens}
    )
    for kind, size in sizes.items():
        results["build"][kind] = in_fresh_process(kind, size, options.peer) | {"num_tokens": size}
    fresh = list(traffic(options.replay, seed=1))
    for mode in ("path", "tree"):
        requests = list(traffic(options.tokens))
        arms = [own_arm("native", open_index(MAX_DEPTH))]
        if with_peer:
            from arctic_inference.suffix_decoding import SuffixDecodingCache

            arms.append(peer_arm(SuffixDecodingCache(MAX_DEPTH)))
        for arm in arms:
            fill(arm, requests)
        outcome = replay(arms, fresh, options.replay, mode == "tree")
        results["replay"][mode] = outcome | {"global_tokens": options.tokens}
        del arms
    small = list(traffic(options.python_tokens))
    arms = [own_arm("native", open_index(MAX_DEPTH)), own_arm("python", PythonSuffixIndex(MAX_DEPTH))]
    for arm in arms:
        fill(arm, small)
    outcome = replay(arms, fresh, options.replay // 10, False)
    results["replay"]["path, with the Python index"] = outcome | {"global_tokens": options.python_tokens}
    report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


def cpu_name() -> str:
    """The processor as /proc/cpuinfo calls it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
