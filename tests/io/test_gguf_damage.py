"""Damaged GGUF files end in one clear line: never a crash, a hang, or memory the file could not fill."""

import os
import re
import struct
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftsmith.errors import ModelFileError, UnsupportedError, UserError
from draftsmith.io.files import open_model
from draftsmith.io.gguf import GgufFiles
from draftsmith.io.gguf_header import READABLE_TYPES
from draftsmith.models.spec import DecoderSpec
from draftsmith.models.tokenizer import Tokenizer
from tests.io import samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def valid(folder):
    return samples.small_gguf(folder / "valid.gguf").read_bytes()


def use_everything(path):
    """What a loader does with a file, short of running the model. Returns the error it met, if any."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            files = GgufFiles(path)
            DecoderSpec.from_config(files.config)
            for name in files.tensor_names:
                files.load(name)
                files.raw(name)
            tokenizer = Tokenizer.from_data(files.tokenizer)
            tokenizer.decode(tokenizer.encode("hello world 12", special=True))
    except UserError as error:
        return error
    return None


def check_refused(path, pattern, kind=ModelFileError):
    """The error is of this kind, names the file and stays on one short line."""
    error = use_everything(path)
    assert isinstance(error, kind), error
    message = str(error)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    assert re.search(pattern, message), message


def put(folder, data):
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    return path


def entry(key, kind, payload):
    """One metadata entry as bytes."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


def header(entries=(), tensors=(), counts=None, version=3):
    """A hand-made header. `counts`: (tensors, entries) to announce instead of the true ones."""
    num_tensors, num_entries = counts or (len(tensors), len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(tensors)


def tensor(name, dims, kind=0, offset=0):
    return (
        struct.pack("<Q", len(name))
        + name
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


ARCHITECTURE = entry(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")


class TestRefusals:
    def test_the_valid_file_is_valid(self, folder, valid):
        assert use_everything(put(folder, valid)) is None

    @pytest.mark.parametrize(
        ("data", "pattern"),
        [
            (b"", "file is empty"),
            (b"GG", "not a GGUF file"),
            (b"PK\x03\x04" + bytes(100), r"starts with b'PK\\x03\\x04'.*b'GGUF'"),
            (b"GGUF", "truncated.*version"),
            (header(version=1), "version 1 .*2 and 3"),
            (header(version=0), "version 0"),
            (header(counts=(0, 1 << 62)), "4611686018427387904 metadata entries"),
            (header(counts=(1 << 62, 0)), "4611686018427387904 tensors"),
            (header([entry(b"k", 99, bytes(20))]), "'k'.*unknown value type 99"),
            (header([entry(b"k", 9, struct.pack("<IQ", 77, 1) + bytes(20))]), "'k'.*unknown value type 77"),
            (header([entry(b"k", 9, struct.pack("<IQ", 8, 1 << 60) + bytes(20))]), "strings of metadata key 'k'"),
            (header([entry(b"k", 9, struct.pack("<IQ", 4, 1 << 60) + bytes(20))]), "elements of metadata key 'k'"),
            (header([entry(b"k", 9, struct.pack("<IQ", 9, 1 << 60) + bytes(20))]), "arrays of metadata key 'k'"),
            (header([entry(b"k", 9, struct.pack("<IQ", 9, 1) * 4 + bytes(99))]), "unknown value type 9"),
            (header([entry(b"k", 8, struct.pack("<Q", 1 << 61) + bytes(20))]), "damaged.*'k'"),
            (header([entry(b"k", 8, struct.pack("<Q", 1000) + bytes(20))]), "truncated.*'k'"),
            (header([entry(b"k", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "'k' is not UTF-8"),
            (header([entry(b"k", 9, struct.pack("<IQQ", 8, 1, 2) + b"\xff\xfe")]), "string 0 of .* is not UTF-8"),
            (header([entry(b"k", 9, struct.pack("<IQQ", 8, 1, 50) + b"abc")]), "truncated: .*the value of .*'k'"),
            (header([entry(b"\xff", 0, b"\0")]), "metadata key is not UTF-8"),
            (header([struct.pack("<Q", 5000) + bytes(5100)]), "damaged: a metadata key of 5000 bytes"),
            (header([entry(b"k", 0, b"\1"), entry(b"k", 0, b"\1")]), "'k' stands twice"),
            (header([]), "'general.architecture' is missing"),
            (header([entry(b"general.architecture", 4, bytes(4))]), "'general.architecture' must be a string"),
            (header([ARCHITECTURE]), "'token_embd.weight' is missing"),
            (header([entry(b"general.alignment", 4, struct.pack("<I", 24))], []), "'general.alignment' is 24"),
            (header([], [tensor(b"t", [])]), "0 dimensions"),
            (header([], [tensor(b"t", [1] * 5)]), "5 dimensions"),
            (header([], [tensor(b"t", [4]), tensor(b"t", [4])]), "'t' stands twice"),
            (header([], [tensor(b"t", [0])]), "dimension of 0"),
            (header([], [tensor(b"t", [4], kind=4)]), "unknown type 4;"),
            (header([], [tensor(b"t", [4], kind=1000)]), "unknown type 1000; types read are F32"),
            (header([], [tensor(b"t", [33], kind=2)]), "rows of 33 elements, Q4_0 needs a multiple of 32"),
            (header([], [tensor(b"t", [1 << 62, 1 << 62])]), "truncated or damaged: tensor 't'"),
            (header([], [tensor(b"t", [4], offset=1 << 62)]) + bytes(64), "truncated or damaged: tensor 't'"),
            (header([], [tensor(b"\xff", [4])]), "tensor name is not UTF-8"),
        ],
    )  # fmt: skip
    def test_one_line_says_what_is_wrong(self, folder, data, pattern):
        check_refused(put(folder, data), pattern)

    @pytest.mark.parametrize(
        ("data", "pattern"),
        [
            (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
            (header([], [tensor(b"t", [256], kind=23)]), "'t' is of type IQ4_XS.*types read are F32, F16"),
            (header([], [tensor(b"t", [256], kind=26)]), "type I32"),
            (header([entry(b"split.count", 2, struct.pack("<H", 3))]), "gguf-split --merge"),
        ],
    )
    def test_known_things_are_refused_by_name(self, folder, data, pattern):
        check_refused(put(folder, data), pattern, UnsupportedError)

    @pytest.mark.parametrize(
        ("changes", "pattern"),
        [
            ({"embedding_length": None}, "'llama.embedding_length' is missing"),
            ({"context_length": 0}, "'llama.context_length' is 0"),
            ({"attention.head_count": "four"}, "'llama.attention.head_count' must be a whole number, is str"),
            ({"attention.head_count": True}, "must be a whole number, is bool"),
            ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
            ({"attention.layer_norm_rms_epsilon": float("nan")}, "must be finite"),
            ({"rope.freq_base": "x"}, "must be a number"),
            ({"block_count": 4_000_000_000}, "announces 4000000000 layers, there are tensors of 2"),
            ({"block_count": 1}, "announces 1 layers, there are tensors of 2"),
            ({"embedding_length": 1, "rope.dimension_count": 2}, "embedding_length' is 1, too few for 4 heads"),
            ({"rope.scaling.type": "yarn", "rope.scaling.factor": -1.0}, "factor' is -1.0, must be above 0"),
            ({"attention.head_count": 6}, "'model.layers.0.self_attn.q_proj.weight' has 64 rows.*6 heads"),
        ],
    )
    def test_config_keys(self, folder, changes, pattern):
        check_refused(samples.small_gguf(folder / "config.gguf", model=changes), pattern)

    def test_two_tensors_for_one_weight(self, folder):
        """The later one was taken, whichever it was."""
        tensors = samples.llama_tensors()
        tensors["blk.01.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"] + 1
        path = samples.write_gguf(folder / "twice.gguf", samples.llama_metadata(), tensors)
        check_refused(path, r"'blk.1.ffn_up.weight' and 'blk.01.ffn_up.weight' both stand for 'model.layers.1.mlp.up")

    def test_rotary_factors_for_other_heads(self, folder):
        """A table for heads of 4294967294 dimensions was computed before anybody looked at what the file has."""
        tensors = samples.llama_tensors() | {"rope_freqs.weight": np.ones(8, np.float32)}
        metadata = samples.llama_metadata(**{"attention.key_length": 4294967294})
        path = samples.write_gguf(folder / "factors.gguf", metadata, tensors)
        check_refused(path, "'rope_freqs.weight' has 8 factors for heads of 4294967294 dimensions")

    def test_a_pattern_of_windows_that_is_no_number(self, folder):
        tensors = samples.llama_tensors()
        keys = samples.llama_metadata(**{"attention.sliding_window_pattern": "often"})
        metadata = {key.replace("llama", "gemma2"): value for key, value in keys.items()}
        path = samples.write_gguf(folder / "pattern.gguf", metadata, tensors, "gemma2")
        check_refused(path, "sliding_window_pattern' must be a whole number, is str")

    def test_a_missing_tensor_is_named_by_its_hugging_face_name(self, folder):
        files = open_model(str(samples.small_gguf(folder / "m.gguf", drop=["output_norm.weight"])))
        with pytest.raises(ModelFileError, match=r"no tensor for 'model\.norm\.weight'"):
            files.load("model.norm.weight")
        assert "model.norm.weight" not in files

    def test_a_file_that_cannot_be_read(self, folder):
        with pytest.raises(ModelFileError, match="cannot be read"):
            GgufFiles(folder / "nowhere.gguf")
        with pytest.raises(ModelFileError, match="cannot be read"):
            GgufFiles(folder)

    def test_absurd_counts_cost_neither_time_nor_memory(self, folder):
        """65 thousand entries that would fit the file, each announcing more than there is."""
        strings = entry(b"k", 9, struct.pack("<IQ", 8, 1 << 22) + bytes(1 << 20))
        path = put(folder, header([strings], counts=(0, 65_000)))
        tracemalloc.start()
        start = time.process_time()
        check_refused(path, "strings of metadata key 'k'")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20
        assert time.process_time() - start < 1.0


def test_a_file_cut_short_while_it_is_open(folder, valid):
    """Tensors were read through a mapping: whoever overwrote a file that was being loaded killed the process."""
    path = folder / "cut while open.gguf"
    path.write_bytes(valid)
    files = GgufFiles(path)
    assert files.tokenizer["tokens"]
    os.truncate(path, 4096)
    for read in (files.load, files.raw):
        with pytest.raises(ModelFileError, match="has become shorter since it was opened"):
            read("model.layers.1.mlp.down_proj.weight")
    if sys.platform == "linux":
        assert path.name not in Path("/proc/self/maps").read_text()


class TestCuts:
    def test_every_cut_is_refused(self, folder, valid):
        """All cut points at coarse steps, and each of the first and last thousand bytes."""
        size = len(valid)
        cuts = {*range(0, 1000, 7), *range(1000, size - 300, 997), *range(size - 300, size, 11)}
        header_end = valid.index(b"blk.0.ffn_up.weight")
        cuts |= set(range(header_end - 40, header_end + 60))
        for cut in sorted(cuts):
            check_refused(put(folder, valid[:cut]), "not a GGUF file|truncated|file is empty|cut off")

    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(data=st.data())
    def test_any_damage_ends_in_a_user_error_or_none(self, data, folder, valid):
        changed = bytearray(valid)
        for _ in range(data.draw(st.integers(1, 4))):
            # Most of a file is tensor data, whose damage only changes numbers: aim at the header.
            at = data.draw(st.integers(0, valid.index(b"blk.0.ffn_up.weight") + 2000))
            new = data.draw(
                st.one_of(
                    st.binary(min_size=1, max_size=12),
                    st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]).map(
                        lambda number: struct.pack("<Q", number)
                    ),
                )
            )
            if data.draw(st.booleans()):
                changed[at : at + len(new)] = new
            else:
                changed[at:at] = new
        path = folder / "fuzzed.gguf"
        path.write_bytes(changed)
        start = time.process_time()
        error = use_everything(path)
        assert time.process_time() - start < 5.0
        assert error is None or "\n" not in str(error)

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(noise=st.binary(max_size=400))
    def test_noise_after_the_magic(self, noise, folder):
        path = folder / "noise.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<I", 3) + noise)
        assert isinstance(use_everything(path), UserError)


def test_the_table_of_types_is_the_formats():
    import gguf

    for name, block in READABLE_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == tuple(block)
    assert np.dtype("<f4").itemsize == READABLE_TYPES["F32"].nbytes
