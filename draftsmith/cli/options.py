"""Options of every command as frozen dataclasses; a field's annotation holds its flag and its help.

Called by `app`, which turns each class into a command line, and by the commands, which get an
instance. Invariants: nothing heavy is imported here, so that `--help` stays quick; ranges are checked
by those who own them (`GenerationParams`, `Engine.load`), not here. Bases are listed last section
first: a dataclass collects fields from its last base on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

_MODEL = "Model and drafter"
_SAMPLING = "Sampling"
_LENGTH = "Length"
_OUTPUT = "Output"
_WORKLOAD = "Workload"
_ARMS = "Arms and measuring"
_ENDPOINT = "An endpoint instead"
_EVIDENCE = "Evidence"

_DRAFTER_HELP = "auto, none, suffix, eagle3, ...; draftsmith options lists them"


class When(StrEnum):
    """When to do something that only suits a terminal."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Shared by all commands."""

    json: Annotated[
        bool, Option("--json", help="One JSON document on stdout, nothing else", rich_help_panel=_OUTPUT)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ModelOption:
    """Which model."""

    model: Annotated[
        str,
        Option("--model", "-m", metavar="NAME", help="Name in `draftsmith models`, or a path", rich_help_panel=_MODEL),
    ] = "smollm2"


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """How the model runs."""

    controller: Annotated[
        str,
        Option(
            "--controller", metavar="NAME", help="Draft lengths; draftsmith options lists them", rich_help_panel=_MODEL
        ),
    ] = "auto"
    backend: Annotated[
        str, Option("--backend", metavar="NAME", help="native, reference, or auto", rich_help_panel=_MODEL)
    ] = "auto"
    dtype: Annotated[
        str, Option("--dtype", metavar="TYPE", help="Floats of the reference backend", rich_help_panel=_MODEL)
    ] = "auto"
    threads: Annotated[
        int | None, Option("--threads", metavar="N", help="CPU threads [all cores]", rich_help_panel=_MODEL)
    ] = None


@dataclass(frozen=True, kw_only=True)
class DrafterOption:
    """The one drafter of a command."""

    drafter: Annotated[str, Option("--drafter", "-d", metavar="NAME", help=_DRAFTER_HELP, rich_help_panel=_MODEL)] = (
        "suffix"
    )


@dataclass(frozen=True, kw_only=True)
class CoreSamplingOptions:
    """The law an answer is drawn from, as far as a benchmark varies it."""

    temperature: Annotated[
        float, Option("--temperature", "-t", metavar="T", help="0 is greedy", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float, Option("--top-p", metavar="P", help="Keep the likeliest up to this sum", rich_help_panel=_SAMPLING)
    ] = 1.0
    seed: Annotated[
        int, Option("--seed", "-s", metavar="S", help="Same seed, same text", rich_help_panel=_SAMPLING)
    ] = 0
    rule: Annotated[
        str, Option("--rule", metavar="NAME", help="How drafts are verified; docs/lossy.md", rich_help_panel=_SAMPLING)
    ] = "coupling"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(CoreSamplingOptions):
    """The law an answer is drawn from."""

    top_k: Annotated[
        int, Option("--top-k", metavar="K", help="Keep the K likeliest, 0 keeps all", rich_help_panel=_SAMPLING)
    ] = 0
    min_p: Annotated[
        float, Option("--min-p", metavar="P", help="Drop below P times the likeliest", rich_help_panel=_SAMPLING)
    ] = 0.0
    repetition_penalty: Annotated[
        float, Option("--repetition-penalty", metavar="X", help="Prompt and answer; 1: off", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, Option("--presence-penalty", metavar="X", help="Answer only; 0: off", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Option("--frequency-penalty", metavar="X", help="Answer only; 0: off", rich_help_panel=_SAMPLING)
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Where an answer ends."""

    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", "-n", metavar="N", rich_help_panel=_LENGTH, help="Most tokens to write")
    ] = 256
    stop: Annotated[
        list[str], Option("--stop", metavar="TEXT", help="End before this text; repeatable", rich_help_panel=_LENGTH)
    ] = field(default_factory=list)
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Write on past the model's own end", rich_help_panel=_LENGTH)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ChatTextOptions:
    """Shared by `generate` and `chat`."""

    system: Annotated[
        str | None, Option("--system", metavar="TEXT", help="System message", rich_help_panel=_OUTPUT)
    ] = None
    color: Annotated[
        When,
        Option("--color", metavar="WHEN", help="Color tokens by origin: always, never", rich_help_panel=_OUTPUT),
    ] = When.AUTO


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(
    JsonOption, ChatTextOptions, LengthOptions, SamplingOptions, RuntimeOptions, DrafterOption, ModelOption
):
    """Options of `draftsmith generate`."""

    prompt: Annotated[str, Argument(metavar="PROMPT")]
    raw: Annotated[
        bool, Option("--raw", help="Continue the text as it is, no chat template", rich_help_panel=_OUTPUT)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ChatOptions(
    JsonOption, ChatTextOptions, LengthOptions, SamplingOptions, RuntimeOptions, DrafterOption, ModelOption
):
    """Options of `draftsmith chat`."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions(JsonOption, RuntimeOptions, DrafterOption, ModelOption):
    """Options of `draftsmith demo`."""


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What a benchmark sends."""

    prompts: Annotated[
        str,
        Option("--prompts", "-p", metavar="FILE", help="A data set's file, or builtin", rich_help_panel=_WORKLOAD),
    ]
    limit: Annotated[
        int | None, Option("--limit", metavar="N", help="First N prompts [all]", rich_help_panel=_WORKLOAD)
    ] = None
    per_category: Annotated[
        int | None,
        Option("--per-category", metavar="N", help="First N of each category [all]", rich_help_panel=_WORKLOAD),
    ] = None
    max_turns: Annotated[
        int, Option("--max-turns", metavar="N", help="Turns of each conversation", rich_help_panel=_WORKLOAD)
    ] = 1
    concurrency: Annotated[
        int, Option("--concurrency", "-c", metavar="C", help="Prompts at once", rich_help_panel=_WORKLOAD)
    ] = 1
    load: Annotated[
        str,
        Option("--load", metavar="L", help="closed:8, poisson:2, trace:FILE, bursty:...", rich_help_panel=_WORKLOAD),
    ] = ""
    requests: Annotated[
        int | None,
        Option("--requests", metavar="N", help="How many an open loop sends [all once]", rich_help_panel=_WORKLOAD),
    ] = None
    lengths: Annotated[
        str, Option("--lengths", metavar="T", help="Tokens in and out: 1k:256,8k:64", rich_help_panel=_WORKLOAD)
    ] = ""
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", "-n", metavar="N", help="Most tokens to write", rich_help_panel=_WORKLOAD)
    ] = 128
    ignore_eos: Annotated[
        bool, Option("--ignore-eos", help="Write on past the model's own end", rich_help_panel=_WORKLOAD)
    ] = False
    raw: Annotated[bool, Option("--raw", help="No chat template", rich_help_panel=_WORKLOAD)] = False


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """What a benchmark compares, and how often."""

    model: Annotated[
        str,
        Option("--model", "-m", metavar="NAME", help="Name in `draftsmith models`, or a path", rich_help_panel=_ARMS),
    ] = "smollm2"
    drafters: Annotated[
        str,
        Option(
            "--drafters",
            "-d",
            metavar="A,B,...",
            help="NAME[@CONTROLLER], or -",
            rich_help_panel=_ARMS,
        ),
    ] = "none,ngram,suffix"
    peer: Annotated[
        list[str],
        Option("--peer", metavar="ENGINE", help="Another engine, see docs/benchmark.md", rich_help_panel=_ARMS),
    ] = field(default_factory=list)
    baseline: Annotated[
        str, Option("--baseline", metavar="ARM", help="What speed-ups are over [none]", rich_help_panel=_ARMS)
    ] = ""
    repeats: Annotated[
        int, Option("--repeats", "-r", metavar="N", help="Times over all prompts, at most", rich_help_panel=_ARMS)
    ] = 1
    precision: Annotated[
        float | None,
        Option("--precision", metavar="X", help="Enough when intervals are +-X, as 0.03", rich_help_panel=_ARMS),
    ] = None
    max_seconds: Annotated[
        float | None, Option("--max-seconds", metavar="S", help="Begin nothing after [no limit]", rich_help_panel=_ARMS)
    ] = None
    timeout: Annotated[
        float, Option("--timeout", metavar="S", help="Silence that fails a request", rich_help_panel=_ARMS)
    ] = 600.0
    targets: Annotated[
        str, Option("--targets", metavar="T", help="Goodput under ttft=0.5,tpot=0.05", rich_help_panel=_ARMS)
    ] = ""


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """Where a benchmark's results go."""

    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Bundle to write", rich_help_panel=_OUTPUT)]
    force: Annotated[bool, Option("--force", help="Replace a bundle that is there", rich_help_panel=_OUTPUT)] = False


@dataclass(frozen=True, kw_only=True)
class BenchOptions(JsonOption, BundleOptions, CoreSamplingOptions, RuntimeOptions, MeasuringOptions, WorkloadOptions):
    """Options of `draftsmith bench`."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(JsonOption):
    """Options of `draftsmith bench compare`."""

    first: Annotated[Path, Argument(metavar="BEFORE")]
    second: Annotated[Path, Argument(metavar="AFTER")]


@dataclass(frozen=True, kw_only=True)
class RescoreOptions(JsonOption):
    """Options of `draftsmith bench rescore`."""

    bundle: Annotated[Path, Argument(metavar="BUNDLE")]


@dataclass(frozen=True, kw_only=True)
class ReportOptions(JsonOption):
    """Options of `draftsmith bench report`."""

    bundles: Annotated[list[Path], Argument(metavar="BUNDLE...")]
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="File or directory [the bundle]", rich_help_panel=_OUTPUT),
    ] = None
    markdown: Annotated[
        bool, Option("--markdown", help="Tables to paste; stdout without -o", rich_help_panel=_OUTPUT)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(JsonOption):
    """Options of `draftsmith models`."""


@dataclass(frozen=True, kw_only=True)
class RegisteredOptions(JsonOption):
    """Options of `draftsmith options`."""

    name: Annotated[str | None, Argument(metavar="[NAME]")] = None


@dataclass(frozen=True, kw_only=True)
class AuditReportOption:
    """Where an audit's report goes."""

    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="Write the report as JSON too", rich_help_panel=_OUTPUT),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions:
    """How much an audit looks at."""

    alpha: Annotated[
        float, Option("--alpha", metavar="A", help="False alarms of a whole audit", rich_help_panel=_EVIDENCE)
    ] = 0.001
    drift: Annotated[
        float, Option("--drift", metavar="TV", help="Total variation to be able to see", rich_help_panel=_EVIDENCE)
    ] = 0.1
    budget: Annotated[
        int, Option("--budget", metavar="N", help="Most tokens the audited engine writes", rich_help_panel=_EVIDENCE)
    ] = 30_000
    max_seconds: Annotated[
        float | None, Option("--max-seconds", metavar="S", help="Most time [no limit]", rich_help_panel=_EVIDENCE)
    ] = None
    max_new_tokens: Annotated[
        int, Option("--max-new-tokens", "-n", metavar="N", help="Tokens of an answer", rich_help_panel=_EVIDENCE)
    ] = 48


@dataclass(frozen=True, kw_only=True)
class AuditedLawOptions:
    """Settings an audit tries; without a temperature a grid of them."""

    temperature: Annotated[
        float | None,
        Option("--temperature", "-t", metavar="T", help="This and greedy [grid]", rich_help_panel=_SAMPLING),
    ] = None
    top_k: Annotated[
        int, Option("--top-k", metavar="K", help="With --temperature: keep the K likeliest", rich_help_panel=_SAMPLING)
    ] = 0
    top_p: Annotated[
        float, Option("--top-p", metavar="P", help="With --temperature: keep up to this sum", rich_help_panel=_SAMPLING)
    ] = 1.0
    rule: Annotated[
        str, Option("--rule", metavar="NAME", help="How drafts are verified; docs/lossy.md", rich_help_panel=_SAMPLING)
    ] = "coupling"
    seed: Annotated[
        int, Option("--seed", "-s", metavar="S", help="Same seed, same audit", rich_help_panel=_SAMPLING)
    ] = 0


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Audit servers instead of a model of ours."""

    endpoint: Annotated[
        str | None,
        Option("--endpoint", metavar="URL", help="Server that drafts, at its /v1", rich_help_panel=_ENDPOINT),
    ] = None
    plain_endpoint: Annotated[
        str | None,
        Option("--plain-endpoint", metavar="URL", help="One that does not draft", rich_help_panel=_ENDPOINT),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AuditOptions(
    JsonOption,
    AuditReportOption,
    EvidenceOptions,
    AuditedLawOptions,
    EndpointOptions,
    RuntimeOptions,
    DrafterOption,
    ModelOption,
):
    """Options of `draftsmith audit`."""
