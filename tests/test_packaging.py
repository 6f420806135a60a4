"""The set-up keeps its promises: pins inside the declared ranges, a build that falls back, a Makefile that explains.

Called by pytest. The build tests make a wheel with the running environment's tools, without the network.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """Package -> version of constraints.txt."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs)
    return {canonicalize_name(name): version for name, version in pairs}


def declared() -> list[Requirement]:
    """Every requirement of pyproject.toml: run time, extras and build."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    extras = [text for group in PROJECT["optional-dependencies"].values() for text in group]
    return [Requirement(text) for text in [*PROJECT["dependencies"], *extras, *build]]


def build_wheel(directory: Path, **environment: str) -> list[str]:
    """Names of the files in a wheel built from a copy of the sources."""
    sources = directory / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, sources)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "assets")
    shutil.copytree(ROOT / "draftsmith", sources / "draftsmith", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = subprocess.run(
        [*command, "--wheel-dir", str(directory), str(sources)],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (wheel,) = directory.glob("draftsmith-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def is_native(names: list[str]) -> bool:
    return any(re.fullmatch(r"draftsmith/_native\..*(so|pyd)", name) for name in names)


def test_pins_lie_in_the_declared_ranges() -> None:
    pinned = pins()
    for requirement in declared():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is declared and not pinned"
        assert requirement.specifier.contains(version), f"{requirement} does not hold for the pinned {version}"


def test_every_range_has_a_lower_end() -> None:
    for requirement in declared():
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), str(requirement)


def test_run_time_needs_no_test_tools() -> None:
    """transformers is the oracle of tests, never a dependency."""
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert names == {
        *("torch", "numpy", "safetensors", "tokenizers", "gguf", "jinja2", "pyyaml", "typer", "rich"),
        "huggingface-hub",
    }


def test_no_host_and_no_local_path_in_the_set_up() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "CMakeLists.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|file://|--(extra-)?index-url|--find-links", text), name


def test_console_script_starts() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="draftsmith")
    assert script.value == PROJECT["scripts"]["draftsmith"]
    assert callable(script.load())


def test_build_without_a_compiler_is_pure_python(tmp_path: Path) -> None:
    names = build_wheel(tmp_path, CC="/bin/false", CXX="/bin/false")
    assert not is_native(names)
    assert "draftsmith/drafters/suffix_index.py" in names
    assert not any(name.startswith("draftsmith/native/") for name in names)
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_build_with_a_compiler_is_native(tmp_path: Path) -> None:
    names = build_wheel(tmp_path)
    assert is_native(names)
    assert not any(name.startswith("draftsmith/native/") for name in names)
    assert {"draftsmith/bench/report/page.html", "draftsmith/bench/report/page.css"} <= set(names)


@pytest.mark.parametrize(
    ("version", "said"), [("Python 3.9.2", "is Python 3.9.2"), (None, "is not there")], ids=["old", "missing"]
)
def test_make_names_an_unusable_python(tmp_path: Path, version: str | None, said: str) -> None:
    """One clear line, no half-made environment."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "draftsmith" / "native").mkdir(parents=True)
    python = tmp_path / "python"
    if version is not None:
        python.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; else exit 1; fi\n')
        python.chmod(0o755)
    command = ["make", f"PYTHON={python}", "demo"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    lines = [line for line in run.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1
    assert lines[0].startswith(f"Draftsmith needs Python >= 3.11, and '{python}' {said}: install a newer one")
    assert not (tmp_path / ".venv").exists()
