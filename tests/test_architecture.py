"""The shape of the code: layers, imports of every module, forbidden constructs, sizes."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import draftsmith

ROOT = Path(draftsmith.__file__).parent
LAYERS = [
    {"errors"},
    {"registry"},
    {"core"},
    {"models", "control", "io"},
    {"drafters"},
    {"engine", "training", "dialects"},
    {"bench", "simulate"},
    {"serve", "advise", "bridge"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ALLOWED_INSIDE_ENGINE = {"base"}  # of draftsmith.drafters
SOURCES = sorted(path for path in ROOT.rglob("*.py"))


def _package(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py") if parts[0] != "__init__.py" else None


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("draftsmith.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_to_lower_layers_only(path):
    own = _package(path)
    if own is None:
        return
    assert own in LEVEL, f"{own} has no layer"
    for name in _imports(path):
        other = name.split(".")[1]
        if other == own or other == "_native":
            continue
        assert LEVEL[other] < LEVEL[own], f"{path} ({own}) imports {name}"
        if own == "engine" and other == "drafters":
            assert name.split(".")[2] in ALLOWED_INSIDE_ENGINE, f"the engine knows a concrete drafter: {name}"


@pytest.mark.parametrize("name", [item.name for item in pkgutil.walk_packages([str(ROOT)], "draftsmith.")])
def test_every_module_imports(name):
    importlib.import_module(name)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_forbidden_constructs(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert path.name not in {"utils.py", "helpers.py", "misc.py"}
    assert text.count("\n") <= 420, f"{path} is too long"
    if path.name != "__init__.py" or text.strip():
        assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno} global"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", f"{path}:{node.lineno} hasattr"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno
            assert length <= 70, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_only_the_edges_catch_broadly():
    """A broad `except` elsewhere would hide a fault as somebody else's number."""
    allowed = {"cli", "serve", "bench"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler) or _package(path) in allowed:
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if broad and not isinstance(node.body[-1], ast.Raise):
                # The engine keeps the cause and hands it to the owners of the step.
                assert path.name == "engine.py" and path.parent.name == "engine", f"{path}:{node.lineno}"


def test_transformers_is_not_imported_at_run_time():
    for path in SOURCES:
        assert "transformers" not in set(_top_level_imports(path)), path


def _top_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names
