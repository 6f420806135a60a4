"""What is written whole: full disks named, places that are nobody's to replace, an older directory that comes back."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from draftsmith.errors import OptionError
from draftsmith.io import tensor_file
from draftsmith.io.staging import check_drafter_output, staged_directory, staged_file
from draftsmith.io.tensor_file import save_tensors


def holds_a_mark(path):
    return (path / "mark").exists()


def check(path):
    check_drafter_output(path, is_drafter=holds_a_mark)


@pytest.mark.parametrize("place", ["", ".", "..", "/", "../.."])
def test_the_working_directory_is_never_replaced(place, tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(OptionError, match="working directory"):
        check(Path(place))
    with pytest.raises(OptionError, match="working directory"):
        check(tmp_path / "a")


def test_what_is_not_ours_is_never_replaced(tmp_path):
    place = tmp_path / "place"
    check(place)
    place.mkdir()
    check(place)
    (place / "thesis.txt").touch()
    with pytest.raises(OptionError, match="holds no drafter"):
        check(place)
    (place / "mark").touch()
    check(place)
    with pytest.raises(OptionError, match="is a file"):
        check(place / "mark")


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ("something else", errno.EIO),
    ],
)
def test_a_full_disk_is_the_systems_error_and_names_the_directory(tmp_path, monkeypatch, said, number):
    def full(*_, **__):
        raise SafetensorError(said)

    monkeypatch.setattr(tensor_file, "save_file", full)
    with pytest.raises(OSError) as caught, staged_directory(tmp_path / "out") as staging:
        save_tensors({"a": torch.zeros(2)}, staging / "model.safetensors")
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_an_older_directory_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").touch()
    rename = Path.rename

    def refuse(self, target):
        if target == place and not (self / "old").exists():
            raise OSError(errno.EBUSY, "busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError), staged_directory(place) as staging:
        (staging / "new").touch()
    assert [file.name for file in place.iterdir()] == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == ["place"]


def test_a_file_that_cannot_be_written_leaves_no_part(tmp_path):
    place = tmp_path / "r.md"
    place.write_text("old")
    with pytest.raises(OSError), staged_file(place) as part:
        part.write_text("ne")
        raise OSError(errno.ENOSPC, "full")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("r.md", "old")]
    with staged_file(place) as part:
        part.write_text("new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("r.md", "new")]
