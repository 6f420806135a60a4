"""Write a GGUF file again in another of llama.cpp's formats, to give it the format it is fastest in.

Run in the peer's environment: python requantise.py IN.gguf OUT.gguf [Q4_0] [--pure]. Prints bits per weight of
both. `--pure` stores every matrix in the format; without it llama.cpp keeps the output matrix finer.
Quantising twice costs some precision, which the quality figures of the result include.
"""

from __future__ import annotations

import argparse
import ctypes

import llama_cpp as C
from llama_context import Model


def main() -> None:
    """Requantise one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("format", nargs="?", default="Q4_0")
    parser.add_argument("--pure", action="store_true")
    options = parser.parse_args()
    params = C.llama_model_quantize_default_params()
    params.ftype = getattr(C, f"LLAMA_FTYPE_MOSTLY_{options.format}")
    params.allow_requantize = True
    params.pure = options.pure
    if C.llama_model_quantize(options.source.encode(), options.target.encode(), ctypes.byref(params)):
        raise SystemExit("llama.cpp could not quantise the file")
    for path in (options.source, options.target):
        print(path, Model(path).describe())


if __name__ == "__main__":
    main()
