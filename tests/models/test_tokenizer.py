"""Tokenizers from GGUF metadata and from tokenizer.json: known answers, oracles, round trips, refusals."""

import itertools
import json
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from draftsmith.errors import ModelFileError, UnsupportedError, UserError
from draftsmith.models.byte_alphabet import CHARACTER_OF_BYTE, byte_level_bytes
from draftsmith.models.gguf_vocabulary import merges_from_scores
from draftsmith.models.pre_tokenizers import CUTS, build_pre_tokenizer
from draftsmith.models.tokenizer import Tokenizer
from tests.models.vocabularies import MERGED, PIECES, embedded, prefixed, sentencepiece, sentencepiece_data, spellable

SENTENCES = [
    "Hello world, it's 2024! They'LL see 3.14159 of 1000000.",
    "naïve café — 日本語のテキスト, Ελληνικά, עברית, हिन्दी ½ ² Ⅷ ٣",
    "🤖👩‍👩‍👧‍👦 e\u0301 ﬁ \u2028 \u00a0 \u200b",
    "def f(x):\n\treturn x_1 + CamelCase[2:]  # HTTPServer\r\n\r\n    \n  y",
    "   leading, trailing   ",
    "\n\n\n",
    "''s 'S can't I'M we'd",
]
WORDS = ["hello", "world", "tokenizer", "123", "4567", "don't", "we're", " ", "\n", "\t", "é", "日本", "🤖", "!?", "x1"]
code_and_words = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def trained():
    """A byte-level vocabulary trained on the sentences: (vocabulary, merges)."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = build_pre_tokenizer(CUTS["qwen2"])
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=list(bytes_to_unicode().values()), special_tokens=[], show_progress=False
    )
    backend.train_from_iterator([*SENTENCES, *WORDS] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level_data(trained, **changes):
    vocabulary, merges = trained
    tokens = [*sorted(vocabulary, key=vocabulary.get), "<|im_start|>", "<|im_end|>", "<note>", "[PAD0]"]
    data = {
        "kind": "gguf",
        "source": "test.gguf",
        "architecture": "qwen2",
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_types": [1] * len(vocabulary) + [3, 3, 4, 5],
        "scores": None,
        "merges": [" ".join(merge) for merge in merges],
        "bos_id": None,
        "eos_id": tokens.index("<|im_end|>"),
        "unk_id": None,
        "pad_id": None,
        "eos_ids": [tokens.index("<|im_end|>")],
        "add_bos": None,
        "add_space_prefix": None,
    }
    return data | changes


class TestEmbeddedModel:
    """SmolLM2 from its GGUF file."""

    def test_known_answers(self):
        tokenizer = embedded()
        assert tokenizer.vocab_size == 49152
        assert [tokenizer.token_text(token) for token in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert tokenizer.encode("Hello", special=False) == [19556]
        assert [tokenizer.token_text(token) for token in tokenizer.encode("a 1234", special=False)] == [
            "a",
            "Ġ",
            "1",
            "2",
            "3",
            "4",
        ]  # digits stand alone, and a space does not join one
        assert tokenizer.eos_ids == {0, 2}
        assert (tokenizer.bos_id, tokenizer.add_bos) == (1, False)
        assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"

    def test_special_text_is_parsed_only_when_asked(self):
        tokenizer = embedded()
        text = "<|im_start|>user\nx<|im_end|>"
        parsed, plain = tokenizer.encode(text, special=True), tokenizer.encode(text, special=False)
        assert (parsed[0], parsed[-1]) == (1, 2)
        assert not {0, 1, 2} & set(plain)
        assert tokenizer.decode(plain) == text
        assert tokenizer.decode(parsed) == "user\nx"
        assert tokenizer.encode(text, special=True) == parsed  # the switch does not stick

    @pytest.mark.parametrize("text", SENTENCES)
    def test_sentences_round_trip(self, text):
        tokenizer = embedded()
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text

    @given(text=spellable)
    def test_any_text_round_trips(self, text):
        tokenizer = embedded()
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text

    @given(ids=st.lists(st.integers(0, 49151), max_size=30))
    def test_decode_equals_the_librarys_decoder(self, ids):
        tokenizer = embedded()
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)

    def test_lone_surrogates_do_no_harm(self):
        tokenizer = embedded()
        assert tokenizer.decode(tokenizer.encode("a\ud800b", special=False)) == "a?b"

    def test_threads_may_ask_for_different_things(self):
        tokenizer = embedded()
        text = "<|im_start|>" * 5
        wrong = []

        def ask(special, expected):
            wrong.extend(ids for _ in range(300) if (ids := tokenizer.encode(text, special=special)) != expected)

        asks = [(special, tokenizer.encode(text, special=special)) for special in (True, False)]
        threads = [threading.Thread(target=ask, args=pair) for pair in asks * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert asks[0] != asks[1]


class TestByteLevel:
    def test_the_byte_table_is_gpt2s(self):
        assert dict(CHARACTER_OF_BYTE) == bytes_to_unicode()
        assert byte_level_bytes("".join(CHARACTER_OF_BYTE.values())) == bytes(range(256))
        assert byte_level_bytes("日") == "日".encode()

    @pytest.mark.parametrize("name", sorted(set(CUTS) & set(GGUF_PRE_TOKENIZER_SPLITS)))
    @pytest.mark.parametrize("text", SENTENCES)
    def test_cuts_equal_the_published_patterns(self, name, text):
        theirs = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
        spelled = pre_tokenizers.Sequence([theirs, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        assert build_pre_tokenizer(CUTS[name]).pre_tokenize_str(text) == spelled.pre_tokenize_str(text)

    def test_cuts_without_an_oracle(self):
        def pieces(name, text):
            return [piece for piece, _ in build_pre_tokenizer(CUTS[name]).pre_tokenize_str(text)]

        assert pieces("gpt-2", "it's 2024!") == ["it", "'s", "Ġ2024", "!"]
        assert pieces("smollm", "it's 2024!") == ["it", "'s", "Ġ", "2", "0", "2", "4", "!"]
        assert pieces("deepseek-coder", "a b, 12\ny") == ["a", "Ġb", ",", "Ġ", "1", "2", "Ċ", "y"]

    @given(text=code_and_words)
    def test_qwen2_equals_transformers(self, text, trained):
        ours = Tokenizer.from_data(byte_level_data(trained))
        theirs = qwen2_oracle(trained)
        assert ours.encode(text, special=True) == theirs.encode(text)

    @pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "tekken", "gpt-4o", "smollm"])
    def test_round_trips_for_every_cut(self, pre, trained):
        tokenizer = Tokenizer.from_data(byte_level_data(trained, pre=pre))
        for text in SENTENCES:
            assert tokenizer.decode(tokenizer.encode(text, special=False)) == text

    def test_composition_is_qwens_alone(self, trained):
        for pre, expected in (("qwen2", "é"), ("llama-bpe", "e\u0301")):
            tokenizer = Tokenizer.from_data(byte_level_data(trained, pre=pre))
            assert tokenizer.decode(tokenizer.encode("e\u0301", special=False)) == expected

    def test_llama3_takes_a_whole_piece_that_is_a_token(self, trained):
        vocabulary, merges = trained
        whole = {**vocabulary, "Ġqxz": len(vocabulary)}  # no merge leads to it
        for pre, expected in (("llama-bpe", 1), ("dbrx", 4)):
            tokenizer = Tokenizer.from_data(byte_level_data((whole, merges), pre=pre))
            assert len(tokenizer.encode(" qxz", special=False)) == expected

    @pytest.mark.parametrize(
        ("pre", "add_bos", "expected"),
        [("qwen2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", True, True)],
    )
    def test_the_begin_token_follows_the_file_then_the_cut(self, pre, add_bos, expected, trained):
        data = byte_level_data(trained, pre=pre, add_bos=add_bos, bos_id=3)
        assert Tokenizer.from_data(data).add_bos is expected

    def test_user_defined_tokens_are_text_and_padding_is_nothing(self, trained):
        tokenizer = Tokenizer.from_data(byte_level_data(trained))
        note, padding = tokenizer.id_of("<note>"), tokenizer.vocab_size - 1
        for special in (True, False):
            assert note in tokenizer.encode("a<note>b", special=special)
        assert tokenizer.decode([note, padding, padding + 1, 10**9]) == "<note>"
        assert not tokenizer.is_special(note)
        assert padding not in tokenizer.encode("[PAD0]", special=True)
        assert tokenizer.token_text(padding + 1) == ""
        assert tokenizer.token_bytes(-1) == b""

    def test_a_file_that_does_not_name_its_cut_warns(self, trained):
        for pre in (None, "default"):
            with pytest.warns(UserWarning, match="GPT-2's cut is used"):
                tokenizer = Tokenizer.from_data(byte_level_data(trained, pre=pre))
            assert tokenizer.decode(tokenizer.encode("it's 12", special=False)) == "it's 12"

    @pytest.mark.parametrize(
        ("changes", "kind", "pattern"),
        [
            ({"pre": "klingon"}, UnsupportedError, r"unknown pre-tokenizer 'klingon'.*known: gpt-2"),
            ({"model": "bert"}, UnsupportedError, "'bert' is not supported; known: gpt2, llama"),
            ({"model": None}, UnsupportedError, "None is not supported"),
            ({"merges": None}, ModelFileError, "without merges"),
            ({"merges": ["ab"]}, ModelFileError, "'ab'.*not two tokens"),
            ({"merges": [" b"]}, ModelFileError, "not two tokens"),
            ({"merges": ["nowhere a"]}, ModelFileError, "not a usable vocabulary.*nowhere"),
        ],
    )
    def test_refusals_name_the_file(self, changes, kind, pattern, trained):
        with pytest.raises(kind, match=pattern) as caught:
            Tokenizer.from_data(byte_level_data(trained, **changes))
        assert str(caught.value).startswith("test.gguf: ")


def qwen2_oracle(trained):
    vocabulary, merges = trained
    oracle = Qwen2Tokenizer(
        vocab=dict(vocabulary), merges=merges, unk_token=None, pad_token=None, eos_token="<|im_end|>"
    )
    oracle.add_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    oracle.add_tokens([AddedToken("<note>", normalized=False)])
    return oracle


def merge_by_score(text, pieces):
    """SentencePiece's algorithm: merge the neighbours whose union scores best, the leftmost of equals."""
    symbols = list(text)
    while True:
        unions = [
            (pieces[left + right], -at)
            for at, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in pieces
        ]
        if not unions:
            return symbols
        at = -max(unions)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


class TestSentencePiece:
    @given(text=st.text("abcehlorw 12", max_size=24))
    def test_merging_by_score_is_sentencepieces(self, text):
        tokenizer = sentencepiece()
        pieces = dict.fromkeys(PIECES, -100.0) | MERGED
        expected = merge_by_score(text.replace(" ", "▁"), pieces)
        assert [tokenizer.token_text(token) for token in tokenizer.encode(text, special=False)] == expected

    @given(data=st.data())
    def test_merges_of_any_scored_vocabulary(self, data):
        """Random vocabularies over three letters, all scores distinct."""
        longer = data.draw(st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=12))
        order = data.draw(st.permutations(longer))
        pieces = {"a": -100.0, "b": -100.0, "c": -100.0} | {piece: -1.0 - rank for rank, piece in enumerate(order)}
        tokens = list(pieces)
        merges = merges_from_scores({piece: tokens.index(piece) for piece in tokens}, list(pieces.values()))
        backend = tokenizers.Tokenizer(models.BPE({piece: tokens.index(piece) for piece in tokens}, merges))
        text = data.draw(st.text("abc", max_size=16))
        assert backend.encode(text).tokens == merge_by_score(text, pieces)

    @pytest.mark.parametrize("text", ["hello world", "a b  c", "ab ab", "é日x", "x\n\ny", "or hello", "🤖 a"])
    def test_llama_equals_transformers(self, text):
        """Their Metaspace differs only where a text starts with a space (they add none then)."""
        data = sentencepiece_data()
        vocabulary = {text: index for index, text in enumerate(data["tokens"])}
        pieces = {text: index for text, index in vocabulary.items() if data["token_types"][index] == 1}
        theirs = LlamaTokenizer(
            vocab=vocabulary, merges=merges_from_scores(pieces, data["scores"]), add_bos_token=False
        )
        assert prefixed().encode(text, special=False) == theirs.encode(text, add_special_tokens=False)
        assert prefixed().decode(theirs.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)

    @given(text=spellable)
    def test_any_text_round_trips(self, text):
        for tokenizer in (sentencepiece(), prefixed()):
            # The mark stands for a space, so a text that holds it cannot come back.
            text = text.replace("▁", "")
            assert tokenizer.decode(tokenizer.encode(text, special=False)) == text

    def test_bytes_stand_in_for_missing_characters(self):
        tokenizer = sentencepiece()
        ids = tokenizer.encode("日\n", special=False)
        assert [tokenizer.token_text(token) for token in ids] == ["<0xE6>", "<0x97>", "<0xA5>", "<0x0A>"]
        assert [tokenizer.token_bytes(token) for token in ids] == [b"\xe6", b"\x97", b"\xa5", b"\n"]
        assert tokenizer.encode("<0x0A>", special=True) != [tokenizer.id_of("<0x0A>")]

    def test_the_prefix_space(self):
        assert prefixed().encode("hello", special=False)[0] == prefixed().id_of("▁")
        assert sentencepiece().encode("hello", special=False) == [sentencepiece().id_of("hello")]
        assert (prefixed().strips_leading_space, sentencepiece().strips_leading_space) == (True, False)
        assert prefixed().decode(prefixed().encode("  a", special=False)) == "  a"

    def test_defaults_and_marks(self):
        tokenizer = prefixed()
        assert (tokenizer.bos_id, tokenizer.add_bos) == (1, True)
        assert tokenizer.eos_ids == {2, tokenizer.id_of("<end_of_turn>")}
        assert all(tokenizer.is_special(token) for token in (0, 1, 2))
        assert tokenizer.decode([1, *tokenizer.encode("<tool>a", special=False), 2]).strip() == "<tool> a"
        assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

    def test_gemma_merges_in_the_order_of_its_tokens(self):
        """Its scores say otherwise; `ab` stands before `bc`, so `abc` splits there."""
        data = sentencepiece_data(architecture="gemma2", add_space_prefix=False)
        data["scores"][data["tokens"].index("bc")] = -0.5
        tokenizer = Tokenizer.from_data(data)
        assert [tokenizer.token_text(token) for token in tokenizer.encode("abc", special=False)] == ["ab", "c"]
        tokenizer = Tokenizer.from_data(data | {"architecture": "llama"})
        assert [tokenizer.token_text(token) for token in tokenizer.encode("abc", special=False)] == ["a", "bc"]

    def test_runs_of_spaces_are_tokens_spelled_as_they_are(self):
        """GGUF files of Gemma spell `▁▁` as two spaces and mark it as defined by the user."""
        data = sentencepiece_data(architecture="gemma2", add_space_prefix=False)
        data["tokens"] = ["  " if token == "<tool>" else token for token in data["tokens"]]
        tokenizer = Tokenizer.from_data(data)
        ids = tokenizer.encode("a  b", special=False)
        assert len(ids) == 3
        assert tokenizer.token_bytes(ids[1]) == b"  "

    def test_no_scores(self):
        with pytest.raises(ModelFileError, match="without scores"):
            Tokenizer.from_data(sentencepiece_data(scores=None))


class TestComparison:
    """What two vocabularies are intersected by."""

    def test_space_marks_and_bytes_compare_equal(self):
        ours, theirs = embedded(), sentencepiece()
        pairs = {"Ġw": "▁w", "hello": "hello", "Ċ": "<0x0A>", CHARACTER_OF_BYTE[0xE6]: "<0xE6>"}
        for left, right in pairs.items():
            texts = {ours.normalized_token_text(ours.id_of(left)), theirs.normalized_token_text(theirs.id_of(right))}
            assert len(texts) == 1
            assert texts.pop().encode("utf-8", "surrogateescape") == theirs.token_bytes(theirs.id_of(right))

    @pytest.mark.parametrize("build", [embedded, sentencepiece, prefixed])
    def test_no_two_tokens_share_a_text(self, build):
        tokenizer = build()
        texts = [tokenizer.normalized_token_text(token) for token in range(tokenizer.vocab_size)]
        filled = [text for text in texts if text]
        assert len(set(filled)) == len(filled)
        assert len(filled) > 200

    def test_what_must_not_be_matched(self, trained):
        tokenizer = sentencepiece()
        assert tokenizer.normalized_token_text(tokenizer.id_of("<0x61>")) == ""  # `a` has a token
        assert tokenizer.normalized_token_text(tokenizer.id_of("<0x20>")) == ""  # so has the space
        assert tokenizer.normalized_token_text(tokenizer.id_of("</s>")) == "\0</s>"
        byte_level = Tokenizer.from_data(byte_level_data(trained))
        assert byte_level.normalized_token_text(byte_level.vocab_size - 1) == ""  # padding
        assert byte_level.normalized_token_text(byte_level.vocab_size) == ""


class TestJson:
    def data(self, backend, config=None, eos_ids=()):
        return {
            "kind": "tokenizer.json",
            "source": "dir/tokenizer.json",
            "json": backend if isinstance(backend, str) else backend.to_str(),
            "config": config or {},
            "eos_ids": list(eos_ids),
        }

    def byte_level(self, trained):
        """The same vocabulary as `byte_level_data`, as a tokenizer.json holds it."""
        vocabulary, merges = trained
        backend = tokenizers.Tokenizer(models.BPE(dict(vocabulary), merges))
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = build_pre_tokenizer(CUTS["qwen2"])
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        backend.add_tokens([AddedToken("<note>", normalized=False)])
        return backend

    @given(text=code_and_words, special=st.booleans())
    def test_byte_level_equals_gguf(self, text, special, trained):
        ours = Tokenizer.from_data(self.data(self.byte_level(trained)))
        gguf = Tokenizer.from_data(byte_level_data(trained))
        text += "<|im_end|><note>"
        ids = ours.encode(text, special=special)
        assert ids == gguf.encode(text, special=special)
        assert ours.decode(ids) == gguf.decode(ids)

    def test_facts(self, trained):
        config = {
            "eos_token": "<|im_end|>",
            "bos_token": {"content": "<|im_start|>", "lstrip": False},
            "pad_token": None,
        }
        tokenizer = Tokenizer.from_data(self.data(self.byte_level(trained), config, eos_ids=[7]))
        end = tokenizer.id_of("<|im_end|>")
        assert tokenizer.eos_ids == {7, end}
        assert tokenizer.bos_id == tokenizer.id_of("<|im_start|>")
        assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        assert tokenizer.is_special(end)
        assert not tokenizer.is_special(tokenizer.id_of("<note>"))
        assert tokenizer.vocab_size == end + 2
        assert tokenizer.token_text(end) == "<|im_end|>"
        assert tokenizer.token_text(tokenizer.vocab_size) == ""

    @pytest.mark.parametrize(
        ("with_processor", "config", "expected"),
        [
            (True, {}, True),
            (False, {}, False),
            (True, {"add_bos_token": False}, False),
            (False, {"add_bos_token": True}, True),
        ],
    )
    def test_the_begin_token_follows_the_config_then_the_post_processor(
        self, with_processor, config, expected, trained
    ):
        backend = self.byte_level(trained)
        if with_processor:
            start = backend.token_to_id("<|im_start|>")
            backend.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
            )
        tokenizer = Tokenizer.from_data(self.data(backend, {"bos_token": "<|im_start|>"} | config))
        assert tokenizer.add_bos is expected
        assert tokenizer.bos_id not in tokenizer.encode("a", special=True)

    def test_truncation_and_padding_are_switched_off(self, trained):
        backend = self.byte_level(trained)
        backend.enable_truncation(3)
        backend.enable_padding(length=64)
        tokenizer = Tokenizer.from_data(self.data(backend))
        text = "hello world " * 20
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text

    @pytest.mark.parametrize("scheme", ["always", "first", "never"])
    def test_metaspace_vocabularies(self, scheme):
        backend = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")]))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = Tokenizer.from_data(self.data(backend))
        assert tokenizer.strips_leading_space is (scheme != "never")
        assert tokenizer.decode(tokenizer.encode("a a", special=False)) == "a a"

    @pytest.mark.parametrize("prefix", [True, False])
    def test_sentencepiece_vocabularies(self, prefix):
        """The backend built from GGUF, written out and read back."""
        source = prefixed() if prefix else sentencepiece()
        tokenizer = Tokenizer.from_data(self.data(source._backend))
        assert tokenizer.strips_leading_space is prefix
        for text in SENTENCES:
            ids = source.encode(text, special=False)
            assert tokenizer.encode(text, special=False) == ids
            assert tokenizer.decode(ids) == source.decode(ids) == text

    @pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 3}', '{"version": "1.0", "model": {"type": "Odd"}}'])
    def test_damaged_files(self, text):
        with pytest.raises(ModelFileError, match=r"^dir/tokenizer\.json: not a usable vocabulary \(.+\)$") as caught:
            Tokenizer.from_data(self.data(text))
        assert "\n" not in str(caught.value)

    def test_a_panic_of_the_library_is_a_damaged_file_too(self):
        document = json.loads(prefixed()._backend.to_str())
        document["model"]["continuing_subword_prefix"] = "a longer prefix than any token"
        with pytest.raises(ModelFileError, match="not a usable vocabulary"):
            Tokenizer.from_data(self.data(json.dumps(document)))

    @given(data=st.data())
    def test_any_damage_ends_in_a_user_error_or_none(self, data):
        document = json.loads(prefixed()._backend.to_str())
        for _ in range(data.draw(st.integers(1, 3))):
            holder, key = document, None
            while isinstance(holder, dict | list) and holder and (key is None or data.draw(st.booleans())):
                inner = holder if key is None else holder[key]
                if not isinstance(inner, dict | list) or not inner:
                    break
                holder = inner
                key = data.draw(st.sampled_from(list(inner)[:20] if isinstance(inner, dict) else range(len(inner))))
            holder[key] = data.draw(
                st.sampled_from([None, -1, 2**63, 1.5, "", "▁", [], {}, [[]], {"type": "Fuse"}, True])
            )
        try:
            tokenizer = Tokenizer.from_data(self.data(json.dumps(document), {"bos_token": "<s>"}))
            tokenizer.decode(tokenizer.encode("hello world </s> 日 12", special=True))
        except UserError as error:
            assert "\n" not in str(error)

    def test_other_decoders_are_refused(self):
        backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
        with pytest.raises(UnsupportedError, match="decoder none is not supported"):
            Tokenizer.from_data(self.data(backend))
        backend.decoder = decoders.WordPiece()
        with pytest.raises(UnsupportedError, match="decoder WordPiece is not supported"):
            Tokenizer.from_data(self.data(backend))
