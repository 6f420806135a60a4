"""A tiny model in a GGUF file, and ways to run the command line over it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from draftsmith.cli import app
from tests.io.samples import TOKENS, byte_level_metadata, llama_metadata, llama_tensors, write_gguf

CONTEXT = 4096
ALPHABET = "abcdefghijklmnopqrstuvwxyz\u0120"  # the last is the byte alphabet's space
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def write_tiny(path, *, context=CONTEXT, template=TEMPLATE, ends=False, seed=0, **tokenizer):
    """A Llama of two weak layers that spells the alphabet, over and over; sampling makes it stumble.

    `ends`: after z comes the end of the answer instead of a space.
    """
    metadata = llama_metadata(context_length=context) | byte_level_metadata(**tokenizer)
    metadata["tokenizer.chat_template"] = template
    tensors = llama_tensors(seed)
    for name, array in tensors.items():
        if name.endswith("norm.weight"):
            array[:] = 1.0
        elif name.startswith("blk"):
            array *= 0.02
    embeddings = tensors["token_embd.weight"]
    head = tensors["output.weight"] = np.zeros_like(embeddings)
    for token, following in zip(ALPHABET, ALPHABET[1:] + ALPHABET[:1], strict=True):
        if ends and following == ALPHABET[-1]:
            following = "<|im_end|>"
        head[TOKENS.index(following)] = 0.12 * embeddings[TOKENS.index(token)]
    return write_gguf(path, metadata, tensors)


def run(*arguments):
    """Run in this process; returns the exit code (output goes to the captured streams)."""
    return app.run([str(argument) for argument in arguments])


def command(*arguments):
    """Words that run the command line in a process of its own."""
    return [sys.executable, "-m", "draftsmith.cli.app", *map(str, arguments)]


def run_apart(*arguments, **settings):
    """Run in a process of its own; returns the completed process with text output."""
    settings = {"capture_output": True, "text": True, "timeout": 60, "env": ENVIRONMENT, **settings}
    return subprocess.run(command(*arguments), check=False, **settings)
