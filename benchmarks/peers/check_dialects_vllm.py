"""The part of `check_dialects.py` that runs with vLLM's own Python and imports nothing of this package.

For every case it builds vLLM's class of the target and of the drafter in this one process, loads the files through
their own `load_weights`, computes taps and draft logits with vLLM's layers, attention and paged cache, and prints how
far they are from the logits in the case's `expected.safetensors`. One JSON line a case.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.v1.attention.backend import CommonAttentionMetadata

_BLOCK = 32
_NUM_BLOCKS = 16


class Runner:
    """One vLLM model with a paged cache, fed a sequence in one or more calls."""

    def __init__(self, model: Any, config: Any, prefix: str) -> None:
        self.model, self.config = model, config
        context = config.compilation_config.static_forward_context
        self._layers = {name: layer for name, layer in context.items() if name.startswith(prefix)}
        self._builders = {}
        for name, layer in self._layers.items():
            spec = layer.get_kv_cache_spec(config)
            room = (_NUM_BLOCKS, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
            layer.bind_kv_cache(torch.zeros(room, dtype=config.model_config.dtype))
            builder = layer.attn_backend.get_builder_cls()
            self._builders[name] = builder(spec, [name], config, torch.device("cpu"))
        self.length = 0

    def __call__(self, num_rows: int, *arguments: Any, **named: Any) -> Any:
        """The model's forward over the next rows of the sequence."""
        start, self.length = self.length, self.length + num_rows
        slots = torch.arange(start, self.length)
        bounds = torch.tensor([0, num_rows], dtype=torch.int32)
        metadata = {}
        for name, builder in self._builders.items():
            common = CommonAttentionMetadata(
                query_start_loc=bounds,
                query_start_loc_cpu=bounds,
                seq_lens=torch.tensor([self.length], dtype=torch.int32),
                num_reqs=1,
                num_actual_tokens=num_rows,
                max_query_len=num_rows,
                max_seq_len=self.length,
                block_table_tensor=torch.arange(_NUM_BLOCKS, dtype=torch.int32)[None],
                slot_mapping=slots,
                positions=slots,
            )
            metadata[name] = builder.build(0, common)
        mapping = dict.fromkeys(self._builders, slots)
        with set_forward_context(metadata, self.config, num_tokens=num_rows, slot_mapping=mapping):
            return self.model(*arguments, **named)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a directory."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    for file in sorted(folder.glob("*.pt")):
        found |= torch.load(file, weights_only=True)
    return found


def loaded(model: Any, folder: Path, config: Any) -> Any:
    """The model with a directory's weights, through its own `load_weights`."""
    model.eval().load_weights(tensors_of(folder).items())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def make_config(base: Path, drafter: Path, method: str, dtype: str) -> Any:
    """vLLM's configuration of target and drafter as its command line would make it.

    The speculator's class is not in its registry any more, and MiMo's config comes with code of its own: for these two
    it is the target's alone, and the classes get their configs by hand.
    """
    speculative = {"model": str(drafter), "method": method, "num_speculative_tokens": 2}
    arguments = EngineArgs(
        model=str(base),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=256,
        block_size=_BLOCK,
        enforce_eager=True,
        speculative_config=None if method in ("mlp_speculator", "mtp") else speculative,
    )
    return arguments.create_engine_config()


def layers_tapped(config: Any, model: Any) -> tuple[int, ...]:
    """The layers that vLLM's runner would tap."""
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    given = get_eagle3_aux_layers_from_config(config.speculative_config)
    return tuple(given) if given else model.get_eagle3_default_aux_hidden_state_layers()


def run_target(
    config: Any, target: Path, tokens: torch.Tensor, *, taps: bool = False, kind: Any = LlamaForCausalLM
) -> tuple[Any, torch.Tensor, Any]:
    """The target, its last hidden states, and the taps side by side."""
    model = loaded(kind(vllm_config=config, prefix="target"), target, config)
    if taps:
        model.set_aux_hidden_state_layers(layers_tapped(config, model))
    output = Runner(model, config, "target.")(len(tokens), tokens, torch.arange(len(tokens)))
    hidden, aux = output if taps else (output, None)
    return model, hidden, torch.cat(aux, dim=-1) if taps else None


def check_eagle3(config: Any, target: Path, drafter: Path, case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM

    tokens, drafted = case["tokens"], case["drafted"]
    own, _, taps = run_target(config, target, tokens, taps=True)
    architectures = config.speculative_config.draft_model_config.hf_config.architectures
    kind = Eagle3Qwen3ForCausalLM if any("Qwen3" in name for name in architectures) else Eagle3LlamaForCausalLM
    model = loaded(kind(vllm_config=config, prefix="draft"), drafter, config)
    if not getattr(model, "has_own_embed_tokens", False):
        model.model.embed_tokens = own.model.embed_tokens
    runner = Runner(model, config, "draft.")
    rows = len(tokens) - 1
    features = model.combine_hidden_states(taps[:-1])
    hidden, carried = runner(rows, tokens[1:], torch.arange(rows), features)
    found = [model.compute_logits(hidden)]
    for step, token in enumerate(drafted.split(1)):
        hidden, carried = runner(1, token, torch.tensor([rows + step]), carried[-1:])
        found.append(model.compute_logits(hidden))
    return found


def check_eagle1(config: Any, target: Path, drafter: Path, case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

    tokens, drafted = case["tokens"], case["drafted"]
    own, hidden, _ = run_target(config, target, tokens)
    model = loaded(EagleLlamaForCausalLM(vllm_config=config, prefix="draft"), drafter, config)
    if not getattr(model, "has_own_embed_tokens", False):
        model.model.embed_tokens = own.model.embed_tokens
    runner = Runner(model, config, "draft.")
    rows = len(tokens) - 1
    output, carried = runner(rows, tokens[1:], torch.arange(rows), hidden[:-1])
    found = [own.compute_logits(output)]
    for step, token in enumerate(drafted.split(1)):
        output, carried = runner(1, token, torch.tensor([rows + step]), carried[-1:])
        found.append(own.compute_logits(output))
    return found


def check_mtp(config: Any, target: Path, drafter: Path, case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    from transformers import Qwen2Config
    from vllm.model_executor.models.mimo import MiMoForCausalLM
    from vllm.model_executor.models.mimo_mtp import MiMoMTP

    tokens, drafted = case["tokens"], case["drafted"]
    own_config = json.loads((target / "config.json").read_text())
    qwen = Qwen2Config(**{**own_config, "model_type": "qwen2"})
    config = config.with_hf_config(qwen, architectures=["MiMoForCausalLM"])
    with set_current_vllm_config(config):
        own, hidden, _ = run_target(config, target, tokens, kind=MiMoForCausalLM)
    # What vLLM itself makes of the target's config for the prediction layer.
    drafting = Qwen2Config(**{**json.loads((drafter / "config.json").read_text()), "model_type": "qwen2"})
    drafting.update({"num_hidden_layers": 0, "n_predict": 1})
    config = config.with_hf_config(drafting, architectures=["MiMoMTPModel"])
    with set_current_vllm_config(config):
        model = loaded(MiMoMTP(vllm_config=config, prefix="draft"), drafter, config)
    model.model.embed_tokens, model.lm_head = own.model.embed_tokens, own.lm_head
    runner = Runner(model, config, "draft.")
    rows = len(tokens) - 1
    # vLLM zeroes the embedding at position 0; everything one position later turns by the same angles between rows.
    output = runner(rows, tokens[1:], torch.arange(1, rows + 1), hidden[:-1])
    found = [model.compute_logits(output)]
    for step, token in enumerate(drafted.split(1)):
        output = runner(1, token, torch.tensor([rows + step + 1]), output[-1:])
        found.append(model.compute_logits(output))
    return found


def check_medusa(config: Any, target: Path, drafter: Path, case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    from vllm.model_executor.models.medusa import Medusa

    _, hidden, _ = run_target(config, target, case["tokens"])
    model = loaded(Medusa(vllm_config=config, prefix="draft"), drafter, config)
    return list(model.compute_logits(model(hidden[:-1])))


def check_mlp_speculator(config: Any, target: Path, drafter: Path, case: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """This version of vLLM keeps the class and its loader but not its loop; the stages are its parts, in the paper's
    order."""
    from vllm.model_executor.models.mlp_speculator import MLPSpeculator
    from vllm.transformers_utils.configs.mlp_speculator import MLPSpeculatorConfig

    tokens = case["tokens"]
    _, hidden, _ = run_target(config, target, tokens)
    drafting = copy.deepcopy(config)
    drafting.model_config.hf_config = MLPSpeculatorConfig.from_pretrained(drafter)
    model = loaded(MLPSpeculator(vllm_config=drafting, prefix="draft"), drafter, config)
    found = []
    anchors = len(tokens) - model.max_speculative_tokens
    state = hidden[:anchors]
    if model.scale_input:
        state = model.ln0(state) / 2**0.5
    for stage in range(model.max_speculative_tokens):
        eaten = model.emb[stage](tokens[1 + stage : 1 + stage + anchors])
        mixed = model.proj[stage](state) + (model.emb_weight / model.state_weight) * eaten
        state = model.activation(model.ln[stage](mixed))
        found.append(model.logits_processor(model.head[stage], state))
    return found


CHECKS = {
    "eagle3": check_eagle3,
    "eagle": check_eagle1,
    "mtp": check_mtp,
    "medusa": check_medusa,
    "mlp_speculator": check_mlp_speculator,
}


def compare(found: list[torch.Tensor], case: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Largest and root mean square difference in units of the expected logits' spread, and whether top tokens agree."""
    worst = total = count = spread = agreed = rows = 0.0
    finite = True
    for depth, theirs in enumerate(found):
        ours = case[f"logits.{depth}"]
        theirs = theirs.float()
        if theirs.shape != ours.shape or not torch.equal(theirs.isfinite(), ours.isfinite()):
            finite = False
            continue
        kept = ours.isfinite()
        difference = (theirs[kept] - ours[kept]).abs()
        worst = max(worst, float(difference.max()))
        total, count = total + float(difference.square().sum()), count + difference.numel()
        spread += float(ours[kept].square().sum())
        agreed, rows = agreed + int((theirs.argmax(-1) == ours.argmax(-1)).sum()), rows + len(ours)
    scale = (spread / count) ** 0.5 if count else 1.0
    return {
        "max": worst / scale,
        "rms": (total / count) ** 0.5 / scale if count else float("inf"),
        "agree": agreed / rows if rows else 0.0,
        "same_ids": finite,
        "num_logits": int(count),
    }


@torch.inference_mode()
def run_case(folder: Path, dtype: str) -> dict[str, Any]:
    about = json.loads((folder / "case.json").read_text())
    target, drafter = folder.parent / about["target"], folder / "export"
    config = make_config(folder.parent / "target-llama", drafter, about["method"], dtype)
    case = load_file(folder / "expected.safetensors")
    with set_current_vllm_config(config):
        kind = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            found = CHECKS[about["method"]](config, target, drafter, case)
        finally:
            torch.set_default_dtype(kind)
    return {"case": folder.name, "dtype": dtype, **compare(found, case)}


def main() -> None:
    port, dtypes, *folders = sys.argv[1:]
    started = False
    for dtype in dtypes.split(","):
        for folder in folders:
            if not started:
                first = make_config(Path(folder).parent / "target-llama", Path(folder) / "export", "mtp", dtype)
                with set_current_vllm_config(first):
                    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
                    initialize_model_parallel(1, 1)
                started = True
            try:
                result = run_case(Path(folder), dtype)
            except Exception as error:  # told to whoever judges the case: a planted fault may well end here
                result = {"case": Path(folder).name, "dtype": dtype, "error": f"{type(error).__name__}: {error}"}
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
