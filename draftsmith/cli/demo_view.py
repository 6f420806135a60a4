"""How the demo looks: columns that fill on a terminal, plain lines elsewhere, nothing for --json.

Called by `demo`, which tells a view what happens. Invariant: a view never computes a figure; it is told
runs and the summary, and draws.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TextIO, final

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftsmith.bench.demo_prompts import DemoPrompt
from draftsmith.bench.differences import NEAR_TIE
from draftsmith.bench.runs import BASELINE, ArmRun, Measured
from draftsmith.cli.console import OutputConsole
from draftsmith.cli.tables import load_notes
from draftsmith.cli.telling import Answer
from draftsmith.cli.writing import ORIGIN_MEANINGS, OriginRuns
from draftsmith.core.stats import summarise
from draftsmith.engine.results import Origin, TokenEvent
from draftsmith.models.tokenizer import Tokenizer

_STYLES = {Origin.ACCEPTED: "green", Origin.CORRECTED: "yellow", Origin.BONUS: "cyan", Origin.PLAIN: ""}
_FRAME_SECONDS = 0.08
_PLAIN_LINES = 6
_MOST_LINES = 24

_WHY = """\
Why it is faster: the model checks several proposed tokens in one step, which costs far less than writing \
them one after the other, and the drafter proposes what followed the last time the same words came up, in \
the prompt or in an earlier answer.
Why the text is the same: a proposed token is kept only where it is the very token the model chooses \
itself; at the first one that is not, the model's own token is written instead.
Where nothing repeats, as in free chat, there is nothing to propose, and the speed is about that of plain \
decoding."""
_WHY_TRAINED = """\
A trained drafter proposes there too: it has learnt what this model tends to say next."""


class DemoView(ABC):
    """What the demo tells while it runs."""

    @abstractmethod
    def say(self, text: str) -> None:
        """A line about the run."""

    @abstractmethod
    def begin(self, item: DemoPrompt, number: int, total: int, arms: Sequence[str]) -> None:
        """A prompt's turn begins."""

    @abstractmethod
    def token(self, drafter: str, event: TokenEvent, answer: Answer) -> None:
        """An arm wrote something."""

    @abstractmethod
    def end(self, item: DemoPrompt, runs: Mapping[str, ArmRun]) -> None:
        """All arms are done with a prompt."""

    @abstractmethod
    def finish(self, summaries: Sequence[Mapping[str, Any]], measured: Sequence[Measured]) -> None:
        """All is measured: the prompts of all kinds, and what the trained drafters did if there are any."""


def choose_view(stream: TextIO, *, json: bool, tokenizer: Tokenizer) -> DemoView:
    """The view that fits where stdout goes."""
    if json:
        return SilentView()
    console = OutputConsole(stream)
    return LiveView(console, tokenizer) if console.is_terminal else PlainView(console)


@final
class SilentView(DemoView):
    """Says nothing: the document is all there is."""

    def say(self, text: str) -> None:
        """Nothing."""

    def begin(self, item: DemoPrompt, number: int, total: int, arms: Sequence[str]) -> None:
        """Nothing."""

    def token(self, drafter: str, event: TokenEvent, answer: Answer) -> None:
        """Nothing."""

    def end(self, item: DemoPrompt, runs: Mapping[str, ArmRun]) -> None:
        """Nothing."""

    def finish(self, summaries: Sequence[Mapping[str, Any]], measured: Sequence[Measured]) -> None:
        """Nothing."""


class ConsoleView(DemoView):
    """What a view of lines and one of columns have in common."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Print it."""
        self._console.print(text, soft_wrap=True)

    def finish(self, summaries: Sequence[Mapping[str, Any]], measured: Sequence[Measured]) -> None:
        """Print the table and what it means."""
        _print_table(self._console, summaries)
        for part in measured:
            _print_differences(self._console, part)
        why = _WHY if len(summaries) == 1 else f"{_WHY} {_WHY_TRAINED}"
        self._console.print(why, soft_wrap=not self._console.is_terminal)


@final
class PlainView(ConsoleView):
    """Lines: the task, the beginning of the answer, the figures."""

    def begin(self, item: DemoPrompt, number: int, total: int, arms: Sequence[str]) -> None:
        """Print the task."""
        self._console.print(f"\n[{number}/{total}] {item.kind}: {item.title}", style="bold", soft_wrap=True)

    def token(self, drafter: str, event: TokenEvent, answer: Answer) -> None:
        """Nothing: the answer is printed when both are done."""

    def end(self, item: DemoPrompt, runs: Mapping[str, ArmRun]) -> None:
        """Print the beginning of the answer, which is the same in all arms, and what it took."""
        lines = runs[BASELINE].requests[0].text.strip().splitlines()
        more = [f"... ({len(lines) - _PLAIN_LINES} more lines)"] if len(lines) > _PLAIN_LINES else []
        for line in lines[:_PLAIN_LINES] + more:
            self._console.print(f"    {line}", soft_wrap=True)
        self._console.print(_verdict(runs), soft_wrap=True)


@final
class LiveView(ConsoleView):
    """A column for each arm, filled as the tokens come; a title and what it took stay."""

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        super().__init__(console)
        self._tokenizer = tokenizer

    def begin(self, item: DemoPrompt, number: int, total: int, arms: Sequence[str]) -> None:
        """Open the columns."""
        self._title = f"[{number}/{total}] {item.kind}: {item.title}"
        self._heads = {name: _shown(name) for name in arms}
        self._texts = {name: Text() for name in arms}
        self._runs = {name: OriginRuns(self._tokenizer) for name in arms}
        # Drawn by hand: a refreshing thread would take time from the arm that is running.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._drawn = 0.0
        self._draw()

    def token(self, drafter: str, event: TokenEvent, answer: Answer) -> None:
        """Add it to the arm's column, colored by origin."""
        for part, origin in self._runs[drafter].of(event):
            self._texts[drafter].append(part, style=_STYLES[origin])
        self._heads[drafter] = f"{_shown(drafter)}  {len(answer.token_ids)} tokens  {answer.seconds:.1f} s"
        if event.finish_reason:
            self._heads[drafter] += f"  {answer.tokens_per_second:.0f} tokens/s"
        if event.finish_reason or time.monotonic() - self._drawn > _FRAME_SECONDS:
            self._draw()

    def end(self, item: DemoPrompt, runs: Mapping[str, ArmRun]) -> None:
        """Close the columns; the prompt's line stays."""
        self._live.stop()
        self._console.print(f"{self._title}\n{_verdict(runs)}", soft_wrap=True)

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        width = self._console.width // len(self._heads)
        height = min(max(self._console.height - 5, 8), _MOST_LINES)
        panels = [
            Panel(_tail(text, width - 4, height - 2), title=self._heads[drafter], width=width, height=height)
            for drafter, text in self._texts.items()
        ]
        self._live.update(Group(Text(self._title, style="bold"), Columns(panels, padding=0), _legend()), refresh=True)


def _legend() -> Text:
    parts = [(f"■ {meaning}  ", _STYLES[origin]) for origin, meaning in ORIGIN_MEANINGS.items() if _STYLES[origin]]
    return Text.assemble(*parts)


def _tail(text: Text, width: int, height: int) -> Text:
    """The last lines of a text that fit a panel."""
    lines = text.wrap(Console(width=width), width)
    return Text("\n").join(lines[-height:])


def _shown(arm: str) -> str:
    return "plain" if arm == BASELINE else arm


def _verdict(runs: Mapping[str, ArmRun]) -> str:
    plain = runs[BASELINE]
    found = [f"{plain.num_tokens} tokens: plain {plain.seconds:.1f} s"]
    for drafter, fast in runs.items():
        if drafter == BASELINE:
            continue
        steps = summarise(fast.events).tokens_per_step
        same = "same ids" if plain.requests[0].token_ids == fast.requests[0].token_ids else "IDS DIFFER"
        found.append(f"{drafter} {fast.seconds:.1f} s, {steps or 1.0:.2f} tokens per step, {same}")
    # One drafter stands in plain's line, several in lines of their own.
    return "    " + (", " if len(found) == 2 else "\n    ").join(found)


def _print_table(console: Console, summaries: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("prompt kind", "drafter"):
        table.add_column(heading, no_wrap=True)
    for heading in ("prompts", "tokens per step", "speed-up", "identical ids"):
        table.add_column(heading, justify="right", no_wrap=True)
    main = summaries[0]["results"][1]
    for kind, figures in main["categories"].items():
        table.add_row(kind, main["arm"], *_cells(figures))
    table.add_section()
    table.add_row("all", main["arm"], *_cells(main))
    for summary in summaries[1:]:
        table.add_section()
        for result in summary["results"][1:]:
            for kind, figures in result["categories"].items():
                table.add_row(kind, result["arm"], *_cells(figures))
    console.print()
    console.print(table)
    console.print()
    console.print()
    for line in load_notes(summaries[0]):
        console.print(f"{line}\n", soft_wrap=not console.is_terminal)


def _cells(figures: Mapping[str, Any]) -> list[str]:
    compared = figures["identical"] + figures["divergent"]
    return [
        str(figures["num_requests"]),
        f"{figures['tokens_per_step']:.2f}",
        f"{figures['speedup']['ratio']:.2f} x",
        f"{figures['identical']} of {compared}",
    ]


def _print_differences(console: Console, measured: Measured) -> None:
    for key, difference in measured.differences.items():
        title = next(
            request.prompt_id for run in measured.runs for request in run.requests if request.prompt == key.prompt
        )
        if difference.gap is None:
            reason = "the gap between the two choices could not be measured"
        elif difference.gap < NEAR_TIE:
            reason = f"a near tie: the model scored the two {difference.gap:.1e} apart, within float32 rounding"
        else:
            reason = f"the model scored the two {difference.gap:.1e} apart, which rounding does not explain"
        console.print(
            f"{title}: {key.arm} differs from plain at token {difference.position}; {reason}.\n", soft_wrap=True
        )
