"""Options of `draftsmith data synth | regenerate | prepare`, as those in `options`.

Called by `app` and by the commands. Invariant: as there, nothing heavy is imported here, and ranges are checked by
those who own them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from draftsmith.cli.options import JsonOption, ModelOption, RuntimeOptions

_DATA = "Data"
_ANSWERS = "Answers"
_USERS = "User turns"
_ENGINE = "Engine"
_OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class WritingOptions:
    """How answers are drawn and where they go."""

    output: Annotated[
        Path, Option("--output", "-o", metavar="DIR", help="A rerun goes on where it ended", rich_help_panel=_OUTPUT)
    ]
    top_p: Annotated[
        float, Option("--top-p", metavar="P", help="Keep the likeliest up to this sum", rich_help_panel=_ANSWERS)
    ] = 1.0
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", "-n", metavar="N", help="Most tokens of an answer", rich_help_panel=_ANSWERS)
    ] = 512
    seed: Annotated[
        int, Option("--seed", "-s", metavar="S", help="Same seed, same texts", rich_help_panel=_ANSWERS)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class BatchOptions(RuntimeOptions):
    """How the engine is kept busy."""

    batch: Annotated[
        int, Option("--batch", "-b", metavar="N", help="Answers written at once", rich_help_panel=_ENGINE)
    ] = 16
    drafter: Annotated[
        str, Option("--drafter", "-d", metavar="NAME", help="Pays at a small --batch only", rich_help_panel=_ENGINE)
    ] = "none"


@dataclass(frozen=True, kw_only=True)
class SynthOptions(JsonOption, BatchOptions, WritingOptions, ModelOption):
    """Options of `draftsmith data synth`."""

    texts: Annotated[
        int | None, Option("--texts", metavar="N", help="Until so many are kept [1000]", rich_help_panel=_DATA)
    ] = None
    answer_tokens: Annotated[
        int | None, Option("--answer-tokens", metavar="N", help="Or so many answer tokens", rich_help_panel=_DATA)
    ] = None
    kinds: Annotated[
        str, Option("--kinds", metavar="A,B,...", help="Of requests, see docs/training.md", rich_help_panel=_DATA)
    ] = ""
    second_turns: Annotated[
        float, Option("--second-turns", metavar="X", help="Share with a second turn", rich_help_panel=_DATA)
    ] = 0.25
    temperature: Annotated[
        float, Option("--temperature", "-t", metavar="T", help="Of sampled answers", rich_help_panel=_ANSWERS)
    ] = 0.7
    greedy: Annotated[
        float, Option("--greedy", metavar="X", help="Share answered greedily", rich_help_panel=_ANSWERS)
    ] = 0.5
    prompt_temperature: Annotated[
        float, Option("--prompt-temperature", metavar="T", help="Of what users say", rich_help_panel=_USERS)
    ] = 0.8
    max_prompt_tokens: Annotated[
        int, Option("--max-prompt-tokens", metavar="N", help="Longer ones are dropped", rich_help_panel=_USERS)
    ] = 160


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(JsonOption, BatchOptions, WritingOptions):
    """Options of `draftsmith data regenerate`."""

    input: Annotated[
        str, Option("--input", "-i", metavar="FILE", help="Prompts, as `bench` reads them", rich_help_panel=_DATA)
    ]
    limit: Annotated[
        int | None, Option("--limit", metavar="N", help="First N prompts [all]", rich_help_panel=_DATA)
    ] = None
    max_turns: Annotated[
        int | None, Option("--max-turns", metavar="N", help="Turns of each [all]", rich_help_panel=_DATA)
    ] = None
    model: Annotated[
        str, Option("--model", "-m", metavar="NAME", help="Ours [smollm2], or the endpoint's", rich_help_panel=_ENGINE)
    ] = ""
    endpoint: Annotated[
        str, Option("--endpoint", metavar="URL", help="A server of OpenAI's API, at its /v1", rich_help_panel=_ENGINE)
    ] = ""
    key_env: Annotated[
        str, Option("--key-env", metavar="NAME", help="Variable with its API key", rich_help_panel=_ENGINE)
    ] = ""
    timeout: Annotated[
        float, Option("--timeout", metavar="S", help="Most seconds of a request", rich_help_panel=_ENGINE)
    ] = 600.0
    temperature: Annotated[
        float, Option("--temperature", "-t", metavar="T", help="0 is greedy", rich_help_panel=_ANSWERS)
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(JsonOption, ModelOption):
    """Options of `draftsmith data prepare`."""

    input: Annotated[
        list[Path], Option("--input", "-i", metavar="PATH", help="Raw texts; repeatable", rich_help_panel=_DATA)
    ]
    output: Annotated[
        Path, Option("--output", "-o", metavar="DIR", help="For train/ and validation/", rich_help_panel=_OUTPUT)
    ]
    max_len: Annotated[int, Option("--max-len", metavar="N", help="Most tokens of a text", rich_help_panel=_DATA)] = (
        2048
    )
    validation: Annotated[
        float, Option("--validation", metavar="X", help="Share of prompts held out", rich_help_panel=_DATA)
    ] = 0.05
    force: Annotated[bool, Option("--force", help="Replace prepared texts that are there", rich_help_panel=_OUTPUT)] = (
        False
    )
