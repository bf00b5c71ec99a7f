"""Who may import what: schedulers no torch, the engine no vLLM, nobody pickle; downwards only."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import vllm_omni
import vllm_omni.engine
from vllm_omni.ar.plugin import register

PACKAGE = Path(vllm_omni.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Folder, or file of the package's root -> parts of the package it may not import.
FORBIDDEN_PARTS = {
    "apps": {"layers", "diffusion", "models", "entrypoints", "engine", "ar"},  # clients over HTTP
    "layers": {"diffusion", "models", "entrypoints", "engine", "ar"},
    "diffusion": {"entrypoints", "engine", "ar"},
    "models": {"entrypoints", "engine", "ar"},
    "plugins": {"models", "entrypoints", "engine", "ar"},
    "benchmark": {"layers", "diffusion", "models", "entrypoints", "engine", "ar"},
    "": {"layers", "diffusion", "models", "entrypoints", "engine", "ar"},
}

# The command line talks to the user of the one model there is; the plugin changes one of vLLM's.
MAY_NAME_A_MODEL = {
    "ar/plugin.py",
    "ar/qwen2_5_vl.py",
    "entrypoints/cli/checkpoint.py",
    "entrypoints/cli/doctor.py",
}


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def folder_of(file: Path) -> str:
    """The part of the package a file belongs to; "" for the package's own files."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(file: Path) -> set[str]:
    """Full names of all modules that a file imports, wherever in the file it does."""
    modules: set[str] = set()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file} has a relative import"
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def docstrings_of(tree: ast.Module) -> Iterator[ast.expr]:
    """Strings that stand alone: documentation of a module, class, function or constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def words_of(file: Path) -> Iterator[str]:
    """Every name and string in a file's code."""
    tree = parse(file)
    docstrings = set(docstrings_of(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings:
                yield node.value
        else:
            for _, value in ast.iter_fields(node):
                if isinstance(value, str):
                    yield value


def test_package_is_found() -> None:
    assert {"layers", "diffusion", "models", "entrypoints", ""} <= {folder_of(f) for f in FILES}


@pytest.mark.parametrize(
    "module",
    [
        "vllm_omni.diffusion.scheduler",
        "vllm_omni.diffusion.messages",
        "vllm_omni.models.qwen_image.scheduler",
        "vllm_omni.models.registry",
        "vllm_omni.request",
        "vllm_omni.outputs",
        "vllm_omni.timeline",
        "vllm_omni.stage_file",
        "vllm_omni",
    ],
)
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'diffusers'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_down(file: Path) -> None:
    if file == PACKAGE / "__init__.py":
        return  # exports names of every part, when they are first used
    parts = {name.split(".")[1] for name in imports_of(file) if name.startswith("vllm_omni.")}
    assert parts & FORBIDDEN_PARTS.get(folder_of(file), set()) == set()


@pytest.mark.parametrize(
    "file", [f for f in FILES if folder_of(f) in ("diffusion", "models", "layers")], ids=name_of
)
def test_engine_does_not_import_vllm(file: Path) -> None:
    assert "vllm" not in {name.partition(".")[0] for name in imports_of(file)}


@pytest.mark.parametrize("file", [f for f in FILES if folder_of(f) != "plugins"], ids=name_of)
def test_plugins_are_loaded_by_name(file: Path) -> None:
    names = imports_of(file)
    assert "cache_dit" not in {name.partition(".")[0] for name in names}
    assert not any(name.startswith("vllm_omni.plugins") for name in names)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_runs_what_it_reads(file: Path) -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    assert {name.partition(".")[0] for name in imports_of(file)} & forbidden == set()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "compile", "__import__"}, node.lineno
            assert called not in {"torch.load", "np.load", "numpy.load"}, node.lineno
        if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "trust_remote_code"}:
            assert ast.unparse(node.value) == "False", node.lineno


@pytest.mark.parametrize(
    "file",
    [f for f in FILES if folder_of(f) != "models" and name_of(f) not in MAY_NAME_A_MODEL],
    ids=name_of,
)
def test_model_is_named_only_among_the_models(file: Path) -> None:
    assert [word for word in words_of(file) if "qwen" in word.lower()] == []


def test_search_for_names_finds_them() -> None:
    """The checks above are worth nothing if they look past what they search for."""
    registry = PACKAGE / "models" / "registry.py"
    assert any("qwen" in word.lower() for word in words_of(registry))
    assert "vllm_omni.ar.engine" in imports_of(PACKAGE / "engine" / "core.py")  # in a function
    assert folder_of(registry) == "models"


@pytest.mark.parametrize("package", [vllm_omni, vllm_omni.engine], ids=lambda p: p.__name__)
def test_exports_match_all(package: ModuleType) -> None:
    assert sorted(package.__all__) == list(package.__all__)
    for name in package.__all__:
        exported = getattr(package, name)
        assert exported is getattr(importlib.import_module(exported.__module__), name)
    assert package.__file__ is not None
    tree = parse(Path(package.__file__))
    for_type_checkers = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_omni.")
        for alias in node.names
    }
    assert for_type_checkers == set(package.__all__)


@pytest.mark.parametrize("package", [vllm_omni, vllm_omni.engine], ids=lambda p: p.__name__)
def test_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute"):
        package.Onmi  # noqa: B018


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_module_imports(file: Path) -> None:
    name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    if folder_of(file) == "ar":
        register()  # as vLLM does before it imports a model
    importlib.import_module(name.removesuffix(".__init__"))
