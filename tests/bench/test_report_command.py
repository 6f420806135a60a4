"""`draftsmith bench report` from bundles to files; the page in a browser."""

import json

import pytest

from draftsmith.bench.bundle import read
from draftsmith.bench.report.render import MARK
from draftsmith.bench.summary import summarise_run
from draftsmith.cli import report as command
from draftsmith.cli.app import run as run_command
from tests.bench import browser
from tests.bench.pages import check_page, html, summary_of
from tests.bench.report_runs import make, write
from tests.bench.test_report import ALL_ARMS, HOSTILE, needs_plots


class TestCommand:
    """From bundles to files."""

    @pytest.fixture
    def bundle(self, tmp_path):
        return write(make(prompts=3), tmp_path / "first")

    def call(self, *arguments, code=0):
        assert run_command(["bench", "report", *map(str, arguments)]) == code

    def test_rescore_stays_exact(self, bundle):
        assert summary_of(read(bundle)) == json.loads((bundle / "summary.json").read_text())

    @needs_plots
    def test_the_page_goes_into_the_bundle_and_replaces_only_itself(self, bundle, capsys):
        self.call(bundle)
        text = (bundle / "report.html").read_text()
        assert MARK in text[:300]
        check_page(text)
        assert str(bundle / "report.html") in capsys.readouterr().err
        (bundle / "report.html").write_text(text.replace("fake", "old"))
        self.call(bundle)
        assert (bundle / "report.html").read_text() == text
        (bundle / "report.html").write_text("mine")
        self.call(bundle, code=2)
        assert (bundle / "report.html").read_text() == "mine"

    @needs_plots
    def test_names_of_the_output(self, bundle, tmp_path, capsys):
        self.call(bundle, "-o", tmp_path / "site")
        assert (tmp_path / "site" / "report.html").exists()
        other = write(make(prompts=3, concurrency=2), tmp_path / "second")
        self.call(bundle, other, code=2)
        assert "--output" in capsys.readouterr().err
        self.call(bundle, other, "-o", tmp_path / "new" / "both.html", "--json")
        check_page((tmp_path / "new" / "both.html").read_text())
        told = json.loads(capsys.readouterr().out)
        assert [item["bundle"] for item in told["runs"]] == [str(bundle), str(other)]
        assert told["runs"][0]["summary"] == json.loads((bundle / "summary.json").read_text())

    def test_markdown_goes_to_stdout(self, bundle, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(command, "can_draw", lambda: False)
        self.call(bundle, "--markdown")
        assert capsys.readouterr().out.startswith(f"<!-- {MARK} -->")
        self.call(bundle, "-o", tmp_path / "report.md")
        assert (tmp_path / "report.md").read_text().startswith(f"<!-- {MARK} -->")
        self.call(bundle, "--markdown", "--json", code=2)

    def test_without_matplotlib_one_line_says_what_to_install(self, bundle, capsys, monkeypatch):
        monkeypatch.setattr(command, "can_draw", lambda: False)
        self.call(bundle, code=2)
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "pip install" in error

    def test_a_run_that_died_is_shown_and_called_so(self, tmp_path, capsys):
        path = write(make(stop_after=5), tmp_path / "died", finish=False)
        self.call(path, "--markdown")
        text = capsys.readouterr().out
        assert "was cut off" in text
        assert "stopped early" in text

    def test_figures_that_are_not_the_logs_are_told(self, bundle, capsys):
        summary = json.loads((bundle / "summary.json").read_text())
        summary["results"][1]["tokens_per_second"] *= 2
        (bundle / "summary.json").write_text(json.dumps(summary))
        self.call(bundle, "--markdown")
        assert "holds other figures" in capsys.readouterr().out

    def test_what_is_no_bundle_is_refused(self, tmp_path, capsys):
        self.call(tmp_path, "--markdown", code=2)
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_failing_report_loses_no_run(self, bundle, capsys, monkeypatch):
        measured = read(bundle)

        def fail(*_):
            raise RuntimeError("no\nfonts")

        monkeypatch.setattr(command, "can_draw", lambda: True)
        monkeypatch.setattr(command, "to_html", fail)
        monkeypatch.setattr(command, "document", lambda *_, **__: None)
        command.leave_report(bundle, measured, summarise_run(measured))
        error = capsys.readouterr().err
        assert "RuntimeError: no fonts" in error
        assert error.count("\n") == 1
        assert not (bundle / "report.html").exists()


@pytest.mark.slow
@needs_plots
@pytest.mark.skipif(browser.find() is None, reason="no Chromium here: install one, or name it in CHROMIUM")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_it_without_complaint(tmp_path, width, dark):
    path = tmp_path / "page.html"
    path.write_text(html(make((*ALL_ARMS, HOSTILE)), make(concurrency=2), draw=True))
    with browser.Browser(browser.find(), tmp_path / "profile") as page:
        page.open(path.as_uri(), width, dark=dark)
        page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
        page.screenshot(tmp_path / "page.png")
        assert page.complaints == []
        assert page.requests == [path.as_uri()]
        # Tables move inside their own box; the page itself does not move sideways.
        assert page.evaluate("document.documentElement.scrollWidth") == width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 24, 28)") == dark
        empty = "[...document.querySelectorAll('figure')].filter(item => item.offsetHeight < 60).length"
        assert page.evaluate(empty) == 0
    assert (tmp_path / "page.png").stat().st_size > 50_000
