"""When requests are sent: laws, determinism, the command-line form, traces and their faults.

The tests of laws draw from fixed seeds, so they fail always or never. Had the seeds been chosen at random, one
comparison would fail by chance with probability 1e-6; there are 85 of them, so below 1e-4 for all.
"""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftsmith.bench.arrivals import (
    ClosedLoop,
    GammaBursts,
    OnOffBursts,
    OpenLoop,
    Poisson,
    Trace,
    parse_arrivals,
    plan,
)
from draftsmith.bench.traces import TraceRequest, read_trace
from draftsmith.errors import OptionError, PromptError

SEEDS = range(5)
CHANCE = 1e-6
OPEN = ["poisson:2.5", "bursty:rate=2:cv=4", "bursty:rate=2:cv=0.5", "bursty:rate=2:on=5:off=15"]


def gaps(text, seed, number=4000):
    times = plan(parse_arrivals(text), num_requests=number, seed=seed).times
    return np.diff((0.0, *times))


class TestLaws:
    """The gaps follow the law that was asked for."""

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("rate", [0.1, 2.5, 1000.0])
    def test_poisson(self, seed, rate):
        found = gaps(f"poisson:{rate}", seed)
        assert stats.kstest(found, stats.expon(scale=1 / rate).cdf).pvalue > CHANCE
        # Independent: a gap says nothing about the next.
        assert stats.spearmanr(found[:-1], found[1:]).pvalue > CHANCE

    @pytest.mark.parametrize("seed", SEEDS)
    @pytest.mark.parametrize("cv", [0.25, 1.0, 4.0])
    def test_gamma(self, seed, cv):
        found = gaps(f"bursty:rate=2:cv={cv}", seed)
        law = stats.gamma(cv**-2, scale=cv**2 / 2)
        assert law.mean() == pytest.approx(0.5)
        assert law.std() / law.mean() == pytest.approx(cv)
        # At cv 4 a quarter of the gaps are smaller than what floats can tell apart at the times they are added to.
        tiny, below = 1e-6, law.cdf(1e-6)
        assert stats.binomtest(int((found <= tiny).sum()), len(found), below).pvalue > CHANCE
        assert stats.kstest((law.cdf(found[found > tiny]) - below) / (1 - below), "uniform").pvalue > CHANCE
        assert stats.spearmanr(found[:-1], found[1:]).pvalue > CHANCE

    @pytest.mark.parametrize("seed", SEEDS)
    def test_on_and_off(self, seed):
        times = np.array(plan(OnOffBursts(rate=2, on=5, off=15), num_requests=4000, seed=seed).times)
        spell, inside = np.divmod(times, 20.0)
        assert inside.max() <= 5 + 1e-6
        # 40 requests are expected in each spell; whole spells only.
        counts = np.bincount(spell.astype(int))[:-1]
        dispersion = ((counts - 40.0) ** 2 / 40.0).sum()
        assert CHANCE / 2 < stats.chi2(len(counts)).sf(dispersion) < 1 - CHANCE / 2
        assert stats.kstest(inside / 5, "uniform").pvalue > CHANCE


class TestDeterminism:
    """A seed gives the times, and nothing else does."""

    @pytest.mark.parametrize("text", OPEN)
    def test_the_same_seed_gives_the_same_times(self, text):
        arrivals = parse_arrivals(text)
        times = plan(arrivals, num_requests=50, seed=3).times
        assert times == plan(arrivals, num_requests=50, seed=3).times
        assert times[:20] == plan(arrivals, num_requests=20, seed=3).times
        assert times != plan(arrivals, num_requests=50, seed=4).times
        assert all(0 <= earlier <= later for earlier, later in itertools.pairwise(times))

    def test_times_that_must_not_change_between_versions(self):
        """A bundle names a seed, and another machine must send at the same times."""
        assert plan(Poisson(rate=1), num_requests=3).times == pytest.approx(
            (0.31483048035959016, 2.705797543195352, 6.165458746612479), rel=1e-12
        )
        assert plan(GammaBursts(rate=1, cv=2), num_requests=3).times == pytest.approx(
            (0.123375587226748, 0.16978059863878459, 0.2954059768256455), rel=1e-12
        )

    def test_rates_stretch_the_same_times(self):
        slow, fast = (plan(Poisson(rate=rate), num_requests=50).times for rate in (1, 4))
        assert np.allclose(np.array(slow), 4 * np.array(fast), rtol=1e-12)


class TestForms:
    """The command-line form."""

    def test_forms(self):
        assert parse_arrivals("closed:8") == ClosedLoop(concurrency=8)
        assert parse_arrivals("poisson:2.5") == parse_arrivals("poisson:rate=2.5") == Poisson(rate=2.5)
        assert parse_arrivals("bursty:rate=2:cv=4") == parse_arrivals("bursty:cv=4:rate=2") == GammaBursts(rate=2, cv=4)
        assert parse_arrivals("bursty:rate=2:on=5:off=15") == OnOffBursts(rate=2, on=5, off=15)
        assert parse_arrivals("trace:a:b.csv") == Trace(path=Path("a:b.csv"))
        assert parse_arrivals("trace:a.csv:scale=0.5") == Trace(path=Path("a.csv"), scale=0.5)
        assert plan(ClosedLoop(concurrency=3), num_requests=5) == ClosedLoop(concurrency=3)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", "poisson"),
            ("fast", "poisson"),
            ("closed", "whole number"),
            ("closed:0", "at least 1"),
            ("closed:2.5", "whole number"),
            ("closed:-1", "whole number"),
            ("poisson", "rate"),
            ("poisson:0", "above 0"),
            ("poisson:-1", "above 0"),
            ("poisson:nan", "above 0"),
            ("poisson:inf", "above 0"),
            ("poisson:x", "a number"),
            ("bursty:2", "key=value"),
            ("bursty:rate=2", "rate and cv"),
            ("bursty:rate=2:cv=0", "above 0"),
            ("bursty:rate=2:cv=1000", "between"),
            ("bursty:rate=2:cv=1:on=3", "rate and cv"),
            ("bursty:rate=2:rate=3", "key=value"),
            ("bursty:rate=2:on=0:off=1", "on"),
            ("trace:", "trace:FILE"),
            ("trace:x:scale=0", "scale"),
            ("trace:x:scale=y", "scale"),
        ],
    )
    def test_what_is_wrong_is_said(self, text, part):
        with pytest.raises(OptionError, match=part):
            parse_arrivals(text)

    @given(
        st.text(max_size=20) | st.builds("{}:{}".format, st.sampled_from(["closed", "poisson", "bursty"]), st.text())
    )
    def test_any_text_is_arrivals_or_one_error(self, text):
        try:
            parse_arrivals(text)
        except OptionError:
            pass

    def test_a_plan_of_nothing(self):
        for number in (0, 10**9):
            with pytest.raises(OptionError, match="requests must be from 1 to"):
                plan(Poisson(rate=1), num_requests=number)
        for times in ((), (1.0, 0.5), (-1.0,), (float("nan"),)):
            with pytest.raises(OptionError):
                OpenLoop(times=times)
        with pytest.raises(OptionError, match="do not fit"):
            OpenLoop(times=(1.0,), requests=(TraceRequest(), TraceRequest()))

    def test_without_a_number_each_prompt_comes_once(self):
        assert len(plan(Poisson(rate=1), num_requests=None, num_prompts=7).times) == 7

    def test_prompts_go_round(self):
        assert OpenLoop(times=(0.0, 1.0, 2.0)).prompts((4, 7)) == (4, 7, 4)


@pytest.fixture
def trace(tmp_path):
    def call(content, name="trace.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return call


class TestTraces:
    """Times from a file."""

    def test_json_lines(self, trace):
        path = trace('{"timestamp": 100.5, "prompt": 1, "input_length": 30, "output_len": 4}\n\n{"at": 102, "x": []}\n')
        loop = plan(Trace(path=path, scale=0.5), num_requests=9)
        assert loop.times == (0.0, 0.75)
        assert loop.requests == (TraceRequest(prompt=1, input_len=30, output_len=4), TraceRequest())
        assert loop.skipped == ()
        assert loop.prompts((0, 1)) == (1, 1)
        # A prompt is named by its place in the data, whichever of the others can be sent.
        assert loop.prompts((1, 5)) == (1, 5)
        with pytest.raises(PromptError, match="request 1 of the trace asks for prompt 1, which is none of the 2"):
            loop.prompts((0, 2))
        assert plan(Trace(path=path), num_requests=1).times == (0.0,)
        assert plan(Trace(path=path), num_requests=None, num_prompts=1).times == (0.0, 1.5)

    def test_csv(self, trace):
        path = trace("\ufeffTimestamp, input_len,model,output_len\r\n0.5,7,x,\r\n0.5,,,9\r\n", "trace.csv")
        found = read_trace(path)
        assert found.times == (0.5, 0.5)
        assert found.requests == (TraceRequest(input_len=7), TraceRequest(output_len=9))

    @pytest.mark.parametrize(
        ("content", "name"),
        [
            ('{"timestamp": 1}\n{"timestamp": 2}\n{"times', "t.jsonl"),
            ('{"timestamp": 1}\n{"timestamp": 2}\n{"timestamp": 3', "t.jsonl"),
            ('{"timestamp": 1}\n{"timestamp": 2}\n{"model": "caf\u00e9'.encode()[:-1], "t.jsonl"),
            ("timestamp,prompt\n1,0\n2,0\n3", "t.csv"),
            ('timestamp,prompt\n1,0\n2,0\n3,"a', "t.csv"),
        ],
    )
    def test_half_a_last_line_is_named_counted_and_skipped(self, trace, content, name):
        found = read_trace(trace(content, name))
        assert found.times == (1.0, 2.0)
        (skipped,) = found.skipped
        assert name in skipped
        assert f"line {3 + name.endswith('csv')}" in skipped
        assert plan(Trace(path=trace(content, name)), num_requests=9).skipped == found.skipped

    def test_a_whole_last_line_without_its_end_counts(self, trace):
        assert read_trace(trace('{"time": 1}\n{"time": 2}')).times == (1.0, 2.0)
        assert read_trace(trace("at\n1\n2", "t.csv")).times == (1.0, 2.0)

    @pytest.mark.parametrize(
        ("content", "name", "parts"),
        [
            ('{"timestamp": 1}\n{"timesta\n', "t.jsonl", ["line 2", "not JSON"]),
            ('{"timestamp": 2}\n\n{"timestamp": 1}\n', "t.jsonl", ["line 3", "before", "sort"]),
            ('{"timestamp": 1}\n{"timestamp": -1}\n', "t.jsonl", ["line 2", "negative"]),
            ('{"timestamp": NaN}\n', "t.jsonl", ["line 1", "seconds"]),
            ('{"timestamp": 1e999}\n', "t.jsonl", ["line 1", "seconds"]),
            ('{"timestamp": ' + "1" * 400 + "}\n", "t.jsonl", ["line 1", "seconds"]),
            ('{"timestamp": true}\n', "t.jsonl", ["line 1", "seconds"]),
            ('{"timestamp": "2031-01-01 00:00:00"}\n', "t.jsonl", ["line 1", "seconds", "2031"]),
            ('{"prompt": 1}\n', "t.jsonl", ["line 1", "no time"]),
            ('{"timestamp": 1, "prompt": -1}\n', "t.jsonl", ["line 1", "'prompt'", "whole number"]),
            ('{"timestamp": 1, "prompt": 1.5}\n', "t.jsonl", ["line 1", "'prompt'"]),
            ('{"timestamp": 1, "input_len": 0}\n', "t.jsonl", ["line 1", "'input_len'", "at least 1"]),
            ("[1]\n", "t.jsonl", ["line 1", "object"]),
            ("", "t.jsonl", ["no requests"]),
            ('{"tim', "t.jsonl", ["no requests"]),
            (b'{"timestamp": 1}\n\xff\n', "t.jsonl", ["line 2", "UTF-8"]),
            ("1.5\n2.5\n", "t.csv", ["line 1", "header"]),
            ("timestamp,prompt\n1,2,3\n", "t.csv", ["line 2", "3 columns"]),
            ("timestamp,prompt\n1\n2,3\n", "t.csv", ["line 2", "1 columns"]),
            ("timestamp,timestamp\n1,2\n", "t.csv", ["line 1", "same name"]),
            ("timestamp\nsoon\n", "t.csv", ["line 2", "seconds", "soon"]),
        ],
    )
    def test_what_is_wrong_is_refused_by_line(self, trace, content, name, parts):
        with pytest.raises(PromptError) as caught:
            read_trace(trace(content, name))
        for part in [name, *parts]:
            assert part in str(caught.value)

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(PromptError, match=r"the trace .*absent"):
            plan(Trace(path=tmp_path / "absent.jsonl"), num_requests=1)

    @settings(max_examples=150)
    @given(
        lines=st.lists(
            st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
            | st.lists(st.integers(-1, 9) | st.floats(), min_size=1, max_size=3).map(
                lambda row: ",".join(map(str, row))
            )
            | st.dictionaries(
                st.sampled_from(["timestamp", "prompt", "input_len"]),
                st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]),
            ).map(json.dumps),
            max_size=4,
        ),
        header=st.sampled_from(["", "timestamp\n", "time,prompt\n", "at,prompt,input_len\n"]),
        suffix=st.sampled_from(["jsonl", "csv"]),
        cut=st.integers(0, 3),
    )
    def test_any_file_is_a_trace_or_one_error(self, lines, header, suffix, cut):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"t.{suffix}"
            content = (header + "\n".join(lines)).encode()
            path.write_bytes(content[: len(content) - cut])
            try:
                loop = plan(Trace(path=path), num_requests=9)
            except PromptError as error:
                assert "t." in str(error)
            else:
                assert len(loop.times) == len(loop.requests) > 0
