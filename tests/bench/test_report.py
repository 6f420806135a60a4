"""The report: its numbers are the summary's, its page is whole, and nothing from the data becomes markup."""

import json
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree

import pytest

from draftsmith.bench.report import figures
from draftsmith.bench.report.document import document
from draftsmith.bench.report.render import to_html, to_markdown
from tests.bench.pages import Page, check_page, html, summary_of
from tests.bench.report_runs import make

needs_plots = pytest.mark.skipif(not figures.can_draw(), reason="matplotlib is not installed")
HOSTILE = "<script>alert('1')</script> & \"q\" $x^2$ | `t` *b*"
ALL_ARMS = ("none", "ngram", "suffix", "llama_cpp:model=/a/b_c.gguf")


def numbers_in(value):
    if isinstance(value, dict):
        return {number for item in value.values() for number in numbers_in(item)}
    if isinstance(value, list):
        return {number for item in value for number in numbers_in(item)}
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


def shows(text, value):
    """Whether a cell's text is a rounding of its figure, in one of the units the report uses."""
    match = re.match(r"-?[0-9 ]*[0-9](?:\.([0-9]+))?", text)
    assert match, text
    told = float(match.group(0).replace(" ", ""))
    half = 0.5000001 * 10.0 ** -len(match.group(1) or "")
    units = {"%": [100.0], "×": [1.0]}.get(text[-1], [1.0, 1000.0, 2.0**-20])
    return any(abs(told - value * unit) <= half for unit in units)


@pytest.fixture(scope="module")
def measured():
    return make(ALL_ARMS, fails={"ngram": "no room"}, strays=("suffix",), repeats=2)


@pytest.fixture(scope="module")
def summary(measured):
    return summary_of(measured)


@pytest.fixture(scope="module")
def page(measured):
    return check_page(html(measured))


class TestNumbers:
    """Every number shown is the summary's."""

    def test_every_figure_stands_in_the_summary_and_every_text_rounds_its_figure(self, page, summary):
        known = numbers_in(summary) | {item + 1 for item in range(9)} | {0.25}
        derived = 0
        for key, rows in page.tables.items():
            for row in rows[1:]:
                for text, value in row:
                    if value is None:
                        # Without a figure: words, an interval, several figures, or a dash.
                        continue
                    assert shows(text, value), (key, text, value)
                    if key == "time":
                        derived += 1
                        continue
                    assert value in known or sum(map(int, re.findall(r"\d+", text)[:1])) == value, (key, text, value)
        assert derived == 3 * 9 + 1

    def test_main_table(self, page, summary):
        for shown, values, result in zip(page.rows("arms"), page.values("arms"), summary["results"], strict=True):
            assert shown["arm"] == result["arm"]
            assert shown["engine"] == result["engine"]
            assert values["bits per weight"] == result["bits_per_weight"]
            assert values["tokens/step"] == result["tokens_per_step"]
            assert values["tokens/s"] == result["tokens_per_second"]
            assert values["noise"] == result["noise"]
            assert values["memory, MiB"] == result["memory_bytes"]
            compared = result["identical"] + result["divergent"]
            assert shown["same ids"] == f"{result['identical']} of {compared}"
            speedup = result["speedup"]
            if speedup is None:
                assert shown["speed-up"] == shown["95 % interval"] == "–"
                continue
            assert values["speed-up"] == speedup["ratio"]
            assert shown["95 % interval"] == f"{speedup['low']:.2f}–{speedup['high']:.2f}"
        assert [row["failed"] for row in page.rows("arms")] == ["0", "2 of 12", "0", "0"]
        assert [row["same ids"] for row in page.rows("arms")] == ["6 of 6", "5 of 5", "5 of 6", "6 of 6"]

    def test_results_in_words(self, page, summary):
        speedup = summary["results"][2]["speedup"]
        over = f"{speedup['ratio']:.2f} × ({speedup['low']:.2f}–{speedup['high']:.2f}) over plain"
        assert page.paragraphs["result"][2] == f"suffix: {over}, same ids for 5 of 6."
        assert page.paragraphs["result"][1].endswith("same ids for 5 of 5, 2 of 12 requests failed.")

    def test_categories(self, page, summary):
        shown = {(row["category"], row["arm"]): row for row in page.values("categories")}
        texts = [(row["category"], row["arm"]) for row in page.rows("categories")]
        shown = dict(zip(texts, page.values("categories"), strict=True))
        assert len(shown) == 3 * 3
        for result in summary["results"][1:]:
            for category, own in [("all", result), *result["categories"].items()]:
                row = shown[category, result["arm"]]
                assert row["requests"] == own["num_requests"]
                assert row["tokens/step"] == own["tokens_per_step"]
                assert row["tokens/s"] == own["tokens_per_second"]
                assert row["speed-up"] == own["speedup"]["ratio"]
                assert row["items"] == own["speedup"]["items"]

    def test_depths_and_costs(self, page, summary):
        depths = [item for result in summary["results"] for item in result["depths"]]
        assert [
            {"depth": row["depth"], "trials": row["decided"], "accepted": row["accepted"],
             "conditional": row["conditional"], "survival": row["survival"]}
            for row in page.values("depths")
        ] == depths  # fmt: skip
        costs = [item for result in summary["results"] for item in result["verify_cost"]]
        assert [
            {"rows": row["rows"], "steps": row["steps"], "p25": row["p25, ms"], "p50": row["median, ms"],
             "p75": row["p75, ms"]}
            for row in page.values("cost")
        ] == costs  # fmt: skip

    def test_time_per_token(self, page, summary):
        for row, result in zip(page.values("time"), summary["results"], strict=True):
            assert row["all, ms"] == pytest.approx(result["seconds_total"] / result["emitted_tokens"])
            for part in ("draft", "verify", "sample", "other"):
                if result["seconds"] is None:
                    assert row[f"{part}, ms"] is None
                    continue
                assert row[f"{part}, ms"] == pytest.approx(result["seconds"][part] / result["emitted_tokens"])
                assert row[f"{part}, %"] == pytest.approx(result["seconds"][part] / result["seconds_total"])

    def test_latency(self, page, summary):
        names = {"TTFT": "ttft", "TPOT": "tpot", "ITL by step": "itl_step", "ITL by token": "itl_token"}
        names["end to end"] = "e2e"
        results = {result["arm"]: result for result in summary["results"]}
        for texts, row in zip(page.rows("latency"), page.values("latency"), strict=True):
            found = results[texts["arm"]]["latency"][names[texts["what, in ms"]]]
            assert {name: row[name] for name in found} == found
        goodput = [row["requests that did"] for row in page.values("goodput")]
        assert goodput == [result["latency"]["goodput"]["met"] for result in summary["results"]]

    def test_conventions_failures_differences(self, page, summary):
        shown = page.rows("conventions")
        for place, row in enumerate(shown):
            for result in summary["results"][:3]:
                item = result["conventions"][place]
                assert (row["convention"], row["definition"]) == (item["name"], item["definition"])
                value = item["value"]
                if isinstance(value, list):
                    assert row[result["arm"]] == " ".join(f"{number:.3f}" for number in value)
                else:
                    assert row[result["arm"]] == ("–" if value is None else f"{value:.3f}")
        assert page.rows("failures") == [{"arm": "ngram", "reason": "no room", "requests": "2"}]
        assert page.rows("differences") == [
            {"arm": "suffix", "prompt": "id-1", "turn": "1", "first different token": "5", "gap": "0.25"}
        ]

    def test_conditions_definitions_and_configuration(self, page, summary, measured):
        assert page.facts["Model"] == "fake"
        assert page.facts["Hardware"] == "a processor, 2 cores, 2 threads, 16.0 GiB"
        assert page.facts["Date"] == "2026-01-02T03:04:05+00:00"
        assert page.facts["Versions"] == "python 3, git_revision 012345678901"
        assert "0.12 cores" in page.facts["Other programs"]
        for name, definition in summary["definitions"].items():
            assert page.facts[name] == definition
        assert json.dumps(measured.config, indent=2, ensure_ascii=False) in page.text

    def test_markdown_shows_the_same_tables(self, page, measured, summary):
        text = to_markdown(document([("run", summary, measured)], draw=False))
        tables = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
        assert len(tables) == len(page.tables)
        for table, rows in zip(tables, page.tables.values(), strict=True):
            lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
            del lines[1]
            plain = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in line] for line in lines]
            assert plain == [[" ".join(text.split()) for text, _ in row] for row in rows]


@needs_plots
class TestPlots:
    """Drawings: all there, all whole."""

    def test_a_run_has_all_of_them(self):
        page = check_page(html(make(ALL_ARMS, strays=("suffix",)), draw=True))
        shown = [text for text in page.headings if not text[0].islower()]
        for expected in ("Speed-up over plain by category", "Accepted, given", "Accepted that far", "Wall time per"):
            assert any(text.startswith(expected) for text in shown), expected
        for expected in ("The target's forward", "TTFT", "TPOT", "ITL by step"):
            assert any(text.startswith(expected) for text in page.headings), expected
        for label in ("(ms)", "(%)", "(×)", "(tokens)", "rows scored", "category", "arm"):
            assert label in page.text

    def test_the_same_run_gives_the_same_page(self):
        measured = make(("none",), prompts=2, repeats=1)
        assert html(measured, draw=True) == html(measured, draw=True)

    def test_arms_differ_without_color(self):
        looks = [(look["marker"], str(look["linestyle"])) for look in (figures._look(place) for place in range(12))]
        assert len(set(looks)) == len(looks)
        assert len(set(figures._HATCHES)) == 4

    def test_large_runs_stay_small(self):
        drawn = figures.distributions([(0, [math.sqrt(i + 1) for i in range(50_000)])], "n", "t", ("x", "y"))
        assert len(drawn) < 60_000
        assert "log" not in drawn


@pytest.fixture(scope="module")
def hostile():
    return make(
        ("none", HOSTILE),
        categories=(HOSTILE, "x"),
        fails={HOSTILE: HOSTILE},
        model=HOSTILE,
        prompts=4,
        load=HOSTILE,
        versions={HOSTILE: HOSTILE},
        hardware={"processor": HOSTILE},
        **{HOSTILE: HOSTILE},
    )


class TestHostileData:
    """What comes from data is text."""

    @pytest.mark.parametrize("draw", [False, pytest.param(True, marks=needs_plots)])
    def test_nothing_becomes_markup(self, hostile, draw):
        text = html(hostile, draw=draw)
        page = check_page(text)
        assert "<script" not in text
        assert page.rows("arms")[1]["arm"] == HOSTILE
        assert page.rows("failures")[0]["reason"] == HOSTILE
        assert page.rows("categories")[1]["category"] == HOSTILE
        assert HOSTILE in page.facts["Model"]

    @needs_plots
    def test_labels_are_taken_literally(self):
        series = [figures.Series(1, [1.5], [0], [1.2], [1.9])]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drawn = figures.speedups([("<b>&$x^2$\x07\n", series), ("数学", series)], "n", "t\\1<", "over", 700)
        words = "".join(ElementTree.fromstring(drawn).itertext())
        assert "<b>&$x^2$" in words
        assert "\x07" not in words
        assert "数学" in words
        assert ElementTree.fromstring(drawn).get("aria-label") == "t\\1<"

    def test_markdown_is_escaped(self, hostile):
        text = to_markdown(document([("run", summary_of(hostile), hostile)], draw=False))
        outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        assert "<script" not in outside.replace("\\<script", "")
        fences = re.findall(r"^(`+)json\n(.*?)^\1$", text, flags=re.DOTALL | re.MULTILINE)
        assert len(fences) == 1
        assert json.loads(fences[0][1]) == hostile.config


CASES = {
    "one arm": {"arms": ("none",)},
    "no categories": {"categories": ()},
    "one prompt": {"prompts": 1, "repeats": 1},
    "another engine alone": {"arms": ("vllm",)},
    "other engines without ids": {"arms": ("vllm", "sglang"), "tells_ids": False},
    "an arm that only failed": {"prompts": 1, "fails": {"suffix": "no"}},
    "a baseline that only failed": {"prompts": 1, "fails": {"none": "no"}},
    "everything failed": {"prompts": 1, "fails": {"none": "no", "suffix": "no"}},
    "stopped in a block": {"stop_after": 3},
    "stopped in the first block": {"stop_after": 1},
    "stopped before anything": {"stop_after": 0},
    "an open load": {"load": "poisson:2"},
    "sparse conditions": {"hardware": {}, "versions": {}, "temperature": 0.7},
    "many arms": {"arms": ("none", "ngram", "suffix", *"abcdefghi"), "prompts": 2},
}


class TestMishaps:
    """Runs that lack something are reported all the same."""

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("draw", [False, pytest.param(True, marks=needs_plots)])
    def test_a_page_comes_out(self, case, draw):
        measured = make(**CASES[case])
        page = check_page(html(measured, draw=draw))
        assert len(page.rows("arms")) == len(measured.config["arms"])
        to_markdown(document([("run", summary_of(measured), measured)], draw=False))
        assert "None" not in page.text.split("config.json in full")[0]
        assert "nan" not in [text for rows in page.tables.values() for row in rows for text, _ in row]

    def test_zero_drafts(self):
        page = check_page(html(make(("none", "suffix"), prompts=1, repeats=1, fails={"suffix": "x"})))
        assert any("No arm drafted" in text for text in page.paragraphs["plain"])

    def test_an_interrupted_run_says_so(self):
        page = check_page(html(make(stop_after=5)))
        assert any("stopped early" in text for text in page.paragraphs["warning"])

    def test_a_busy_machine_and_drift_are_told(self):
        measured = make(prompts=2)
        summary = summary_of(measured) | {"other_cores": 1.5, "drift": 0.8}
        page = Page(to_html(document([("run", summary, measured)], draw=False)))
        assert any("1.5 of 2 cores busy" in text for text in page.paragraphs["warning"])
        assert any("0.80 times as fast" in text for text in page.paragraphs["warning"])

    def test_noise_is_not_called_a_result(self):
        measured = make(prompts=2)
        summary = summary_of(measured)
        summary["results"][1]["speedup"] |= {"ratio": 1.01, "low": 0.9, "high": 1.1}
        page = Page(to_html(document([("run", summary, measured)], draw=False)))
        assert "which may be noise" in page.paragraphs["result"][1]

    def test_one_block_makes_no_interval(self):
        page = check_page(html(make(prompts=1, repeats=1), make(prompts=4, concurrency=2, repeats=1)))
        assert "× over plain (one block, so no interval)" in page.paragraphs["result"][2]
        assert page.rows("arms")[1]["95 % interval"] == "–"
        assert page.paragraphs["result"][0].endswith("too few blocks to tell at 1 (requests at a time).")
        assert any("no telling what is noise" in text for text in page.paragraphs["warning"])

    def test_an_open_load_is_not_read_as_speed(self):
        page = check_page(html(make(load="poisson:2")))
        assert any("at times of their own" in text for text in page.paragraphs["warning"])

    def test_ids_that_nobody_told_are_not_called_the_same(self):
        page = check_page(html(make(("vllm", "sglang"), tells_ids=False)))
        assert "ids not compared" in page.paragraphs["result"][1]
        assert page.rows("arms")[1]["same ids"] == "–"


class TestCrossover:
    """Several runs."""

    @pytest.mark.parametrize("draw", [False, pytest.param(True, marks=needs_plots)])
    def test_each_arm_at_each_concurrency(self, draw):
        runs = [make(concurrency=level, prompts=8, repeats=1) for level in (4, 1, 2)]
        page = check_page(html(*runs, draw=draw))
        levels = [row["requests at a time"] for row in page.rows("crossover")]
        assert levels == ["1", "2", "4"] * 2
        summaries = {f"run-{place}": summary_of(item) for place, item in enumerate(runs)}
        for texts, values in zip(page.rows("crossover"), page.values("crossover"), strict=True):
            result = next(item for item in summaries[texts["run"]]["results"] if item["arm"] == texts["arm"])
            assert values["tokens/s"] == result["tokens_per_second"]
            assert values["speed-up"] == (result["speedup"] or {"ratio": None})["ratio"]
        assert any(text.startswith("suffix: faster at 1, 2, 4") for text in page.paragraphs["result"])
        assert len(page.rows("runs")) == 3
        assert not any("differ in more" in text for text in page.paragraphs.get("warning", []))

    def test_one_run_says_how_to_get_it(self):
        page = check_page(html(make(prompts=2)))
        assert "draftsmith bench report bundles/c1" in page.text
        assert "crossover" not in page.tables

    def test_other_settings_that_differ_are_named(self):
        page = Page(html(make(concurrency=1), make(concurrency=2, max_new_tokens=99)))
        assert any("max_new_tokens (24, 99)" in text for text in page.paragraphs["warning"])

    def test_loads_without_a_concurrency_are_left_out(self):
        page = Page(html(make(concurrency=1), make(concurrency=2), make(load="poisson:2")))
        assert len(page.rows("crossover")) == 4
        assert any("without a fixed concurrency" in text for text in page.paragraphs["warning"])
