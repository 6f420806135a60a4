"""Whether exports of drafters mean to vLLM what they mean to us: its own classes load them and give our logits.

    python benchmarks/peers/check_dialects.py --vllm VLLM/bin/python [--work DIR] [--only NAME]

Makes a tiny random target and random drafters, writes each in a published dialect with this package's exporter,
computes draft logits with this package's modules, and has `check_dialects_vllm.py` compute them with vLLM. Faults are
planted too (layer ids off by one, d2t off by one, halves of the concatenation swapped, ...); each must be seen. Exit
code 0 only if every true export agrees and every fault does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from dialect_faults import FAULTS, Tensors
from safetensors.torch import load_file, save_file

from draftsmith.dialects.convert import export, read_native, write_export
from draftsmith.dialects.dialect import Choices, Target
from draftsmith.dialects.table import dialect_named
from draftsmith.drafters.base import TargetInfo
from draftsmith.drafters.checkpoint import module_class, save_module
from draftsmith.drafters.heads import HeadModule
from draftsmith.drafters.recurrent_module import RecurrentModule
from draftsmith.io.files import open_model
from draftsmith.models.backend import RowGroup
from draftsmith.models.choice import open_backend
from draftsmith.models.spec import DecoderSpec, RopeSpec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mimo": {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
}
NUM_TOKENS, NUM_DRAFTED = 40, 2
FLOAT_LIMIT, BFLOAT_LIMIT = 1e-3, 0.1
"""Largest difference that passes, in units of the logits' root mean square: arithmetic in float32 and in bfloat16."""


@dataclass(frozen=True)
class Case:
    """One drafter in one dialect. `method`: vLLM's name. `few`: with a draft vocabulary. `target`: of `TARGETS`.
    `fields`: of the drafter's config, that training does not choose.
    """

    name: str
    dialect: str
    drafter: str
    method: str
    changes: dict[str, str] = field(default_factory=dict)
    few: bool = False
    target: str = "llama"
    fields: dict[str, Any] = field(default_factory=dict)


_LLAMA3 = RopeSpec(theta=500.0, kind="llama3", factor=8.0, original_context=16)
CASES = (
    Case("eagle3", "eagle3", "eagle3", "eagle3", few=True),
    Case("eagle3-taps", "eagle3", "eagle3", "eagle3", {"taps": "1-3-7", "norm_before_residual": "true"}, few=True),
    Case(
        "eagle3.1",
        "eagle3-speculators",
        "eagle3",
        "eagle3",
        {"taps": "0-4-7", "norm_output": "true", "tap_norm": "true", "num_heads": "8", "num_kv_heads": "2"},
    ),
    Case("eagle3-speculators", "eagle3-speculators", "eagle3", "eagle3", few=True),
    Case("eagle3-rope", "eagle3-speculators", "eagle3", "eagle3", fields={"rope": _LLAMA3, "rope_theta": 500.0}),
    Case("eagle3-qwen3", "eagle3-speculators", "eagle3", "eagle3", few=True, fields={"qk_norm": True}),
    Case("eagle1", "eagle1", "eagle1", "eagle"),
    Case("eagle1-biased", "eagle1", "eagle1", "eagle", fields={"qkv_bias": True}),
    Case("medusa", "medusa-vllm", "medusa", "medusa", {"head": "own", "num_layers": "2", "num_depths": "3"}),
    Case("medusa-original", "medusa", "medusa", "medusa", {"head": "own", "num_depths": "3"}),
    Case("medusa-shared", "medusa-vllm", "medusa", "medusa", {"head": "shared", "num_depths": "3"}, few=True),
    Case("medusa-target", "medusa-vllm", "medusa", "medusa", {"num_depths": "2"}, few=True),
    Case("mlp", "mlp-speculator", "mlp_speculator", "mlp_speculator", {"inner_width": "96"}),
    Case("mlp-untied", "mlp-speculator", "mlp_speculator", "mlp_speculator",
         {"tied": "false", "scale_input": "false", "inner_width": "64"}),
    Case("mtp-mimo", "mtp-mimo", "mtp", "mtp", {"variant": "mimo", "qkv_bias": "true"}, target="mimo"),
)  # fmt: skip


# -- our side ------------------------------------------------------------------------------------------


def make_target(folder: Path, changes: dict[str, Any]) -> None:
    """A random decoder that vLLM and we read, of Llama's kind or MiMo's."""
    config = {**CONFIG, **changes}
    generator = torch.Generator().manual_seed(1)
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries, keys = (CONFIG[key] * CONFIG["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], width),
        "lm_head.weight": (CONFIG["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (queries, width),
            f"{at}self_attn.k_proj.weight": (keys, width),
            f"{at}self_attn.v_proj.weight": (keys, width),
            f"{at}self_attn.o_proj.weight": (width, queries),
            f"{at}mlp.gate_proj.weight": (inner, width),
            f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
        }
        if config["model_type"] == "mimo":
            sizes = {"q": queries, "k": keys, "v": keys}
            shapes |= {f"{at}self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        size = 0.2 if len(shape) == 1 else 1.0 if "embed" in name else shape[1] ** -0.5
        scaled = noise * size + (1.0 if "norm" in name else 0.0)
        tensors[name] = scaled.to(torch.bfloat16)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def open_target(folder: Path) -> tuple[Target, TargetInfo]:
    files = open_model(str(folder))
    spec = DecoderSpec.from_config(files.config)
    _, backend = open_backend(spec, files.load, files.raw, backend="reference", dtype="float32", device="cpu")

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    info = TargetInfo(
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
        eos_ids=frozenset(),
        tokenizer=None,
        load_model=refuse,
        make_drafter=refuse,
        backend=backend,
    )
    return Target(name=str(folder), spec=spec, files=files), info


def random_module(case: Case, info: TargetInfo, seed: int) -> Any:
    """A drafter whose every weight matters, rounded to bfloat16 and computed in float32."""
    kind = module_class(case.drafter)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(info.vocab_size, generator=generator)[:200].sort().values if case.few else None
    config = kind.configure(info, case.changes)
    module = kind(dataclasses.replace(config, **case.fields), info, ids)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return module.eval().requires_grad_(False)


def scored_taps(info: TargetInfo, tokens: torch.Tensor, needs: frozenset[Any]) -> dict[Any, torch.Tensor]:
    cache = info.backend.cache
    cache.open(1)
    cache.reserve(1, len(tokens))
    scored = info.backend.score([RowGroup(1, tokens.tolist(), range(-1, len(tokens) - 1), len(tokens))], needs)
    cache.close(1)
    return {tap: rows.clone() for tap, rows in scored.taps[0].items()}


def our_logits(module: Any, info: TargetInfo, tokens: torch.Tensor, drafted: torch.Tensor) -> list[torch.Tensor]:
    """Draft logits over the whole vocabulary, depth by depth, as vLLM hands them out."""
    taps = scored_taps(info, tokens, module.needs)
    found = list(_recurrent(module, taps, tokens, drafted) if isinstance(module, RecurrentModule)
                 else _heads(module, taps["last_hidden"], tokens))  # fmt: skip
    return [_spread(logits, module.draft_ids, info.vocab_size) for logits in found]


def _recurrent(
    module: RecurrentModule, taps: dict[Any, torch.Tensor], tokens: torch.Tensor, drafted: torch.Tensor
) -> Iterator[torch.Tensor]:
    from draftsmith.drafters.draft_layer import Heads, mix_causal

    rows = len(tokens) - 1
    features = torch.cat([taps[tap] for tap in module.taps], dim=-1)[None, :-1]
    hidden, following, kept = module.fuse(features), tokens[None, 1:], None
    for step in range(len(drafted) + 1):
        entry = module.enter(module.embed(following), hidden)
        positions = torch.arange(rows) if step == 0 else torch.tensor([rows + step - 1])
        heads = module.heads(entry, module.turn(positions))
        if kept is None:
            kept, mixed = heads, mix_causal(heads)
        else:
            kept = Heads(
                heads.queries, torch.cat((kept.keys, heads.keys), 1), torch.cat((kept.values, heads.values), 1)
            )
            mixed = _last_row(kept)
        output = module.finish(entry, mixed)
        yield module.logits(output)[0]
        if step < len(drafted):
            hidden, following = module.feedback(output[:, -1:]), drafted[None, step : step + 1]


def _last_row(heads: Any) -> torch.Tensor:
    group = heads.queries.shape[2] // heads.keys.shape[2]
    keys, values = (each.repeat_interleave(group, dim=2).transpose(1, 2) for each in (heads.keys, heads.values))
    mixed = torch.nn.functional.scaled_dot_product_attention(heads.queries.transpose(1, 2), keys, values)
    return mixed.transpose(1, 2)


def _heads(module: HeadModule, hidden: torch.Tensor, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    if module.independent:
        yield from module.all_logits(module.num_depths, hidden[:-1])
        return
    anchors = len(tokens) - module.num_depths
    state = module.begin(hidden[:anchors], tokens[1 : 1 + anchors])
    for depth in range(module.num_depths):
        if depth:
            state = module.advance(depth - 1, state, tokens[1 + depth : 1 + depth + anchors])
        yield module.logits(depth, state)


def _spread(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    if len(ids) == vocab_size:
        return logits.contiguous()
    room = torch.full((len(logits), vocab_size), float("-inf"))
    room[:, ids] = logits
    return room


@torch.inference_mode()
def make_case(case: Case, work: Path, number: int) -> Path:
    """Write a case's native drafter, its export and what we expect of it."""
    target, info = open_target(work / f"target-{case.target}")
    module = random_module(case, info, seed=100 + number)
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(3, info.vocab_size, (NUM_TOKENS,), generator=generator)
    drafted = torch.randint(3, info.vocab_size, (NUM_DRAFTED,), generator=generator)
    folder = work / case.name
    native = folder / "native"
    save_module(native, case.drafter, module.to(torch.bfloat16), "tiny", info, {})
    module.to(torch.float32)
    exported = export(read_native(native, target), dialect_named(case.dialect), target, Choices())
    write_export(exported, folder / "export")
    logits = our_logits(module, info, tokens, drafted)
    expected = {f"logits.{depth}": each.float() for depth, each in enumerate(logits)}
    save_file({"tokens": tokens, "drafted": drafted, **expected}, folder / "expected.safetensors")
    (folder / "case.json").write_text(json.dumps({"target": f"target-{case.target}", "method": case.method}))
    return folder


def plant(work: Path, name: str, fault: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """A copy of a case whose export has a fault."""
    true, folder = work / name, work / f"{name}~{fault.__name__}"
    (folder / "export").mkdir(parents=True)
    for file in ("expected.safetensors", "case.json"):
        (folder / file).write_bytes((true / file).read_bytes())
    config = json.loads((true / "export" / "config.json").read_text())
    weights = next((true / "export").glob("*.safetensors"))
    tensors = load_file(weights)
    fault(config, tensors)
    (folder / "export" / "config.json").write_text(json.dumps(config))
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "export" / weights.name, metadata={"format": "pt"})
    return folder


def ask_vllm(python: str, folders: list[Path], dtypes: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("check_dialects_vllm.py")
    command = [python, str(script), str(port), dtypes, *map(str, folders)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if len(results) < len(folders) * len(dtypes.split(",")):
        sys.exit(f"vLLM's part ended early (exit code {done.returncode})\n{done.stdout[-2000:]}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="vLLM's Python")
    parser.add_argument("--work", type=Path, help="where files are written (a temporary directory)")
    parser.add_argument("--only", default="", help="cases whose name begins like this")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for name, changes in TARGETS.items():
            make_target(work / f"target-{name}", changes)
        cases = [case for case in CASES if case.name.startswith(options.only)]
        true = [make_case(case, work, number) for number, case in enumerate(cases)]
        names = {case.name for case in cases}
        faulty = [plant(work, name, fault) for name, fault in FAULTS if name in names]
        results = ask_vllm(options.vllm, true, "float32,bfloat16") + ask_vllm(options.vllm, faulty, "float32")
    failed = 0
    print(f"{'case':44} {'dtype':9} {'largest':>9} {'rms':>9} {'top 1':>7}  verdict")
    for result in results:
        is_fault = "~" in result["case"]
        limit = FLOAT_LIMIT if result["dtype"] == "float32" else BFLOAT_LIMIT
        agrees = "error" not in result and result["same_ids"] and result["max"] <= limit
        # An error is never good news: a fault that only breaks loading would prove nothing.
        good = "error" not in result and agrees != is_fault
        failed += not good
        verdict = ("seen" if good else "NOT SEEN") if is_fault else ("agrees" if good else "DIFFERS")
        figures = (
            result["error"][:80]
            if "error" in result
            else f"{result['max']:9.2e} {result['rms']:9.2e} {100 * result['agree']:6.1f}%"
            + ("" if result["same_ids"] else " other ids")
        )
        print(f"{result['case']:44} {result['dtype']:9} {figures}  {verdict}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
