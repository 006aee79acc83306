"""The package as it is laid out: what is installed, what links where, and who may import whom."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("kernels", "models", "optim", "parallel")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = SETTINGS["tool"]["setuptools"]["packages"]
# What each package may import, beside itself.
MAY_IMPORT = {
    "kernels": set(),
    "models": {"kernels"},
    "optim": {"kernels"},
    "parallel": {"kernels", "models"},
}


def folder_of(package: str) -> Path:
    mapped = SETTINGS["tool"]["setuptools"]["package-dir"].get(package)
    return ROOT / (mapped or package.replace(".", "/"))


def test_every_package_folder_is_installed():
    found = {
        ".".join(("surogate", *init.parent.relative_to(ROOT).parts))
        for name in LAYERS
        for init in (ROOT / name).rglob("__init__.py")
    }
    for init in (ROOT / "surogate").rglob("__init__.py"):
        if not any(part.is_symlink() for part in (init.parent, *init.parent.parents)):
            found.add(".".join(init.parent.relative_to(ROOT).parts))
    assert found == set(PACKAGES)


@pytest.mark.parametrize("name", LAYERS)
def test_links_point_at_their_folders(name):
    link = ROOT / "surogate" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"


def test_cuda_sources_are_package_data():
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["surogate.kernels"]
    packed = {path for pattern in patterns for path in (ROOT / "kernels").glob(pattern)}
    sources = {p for p in (ROOT / "kernels").rglob("*") if p.suffix in (".cu", ".cuh")}
    assert sources and packed == sources


@pytest.mark.parametrize("name", LAYERS)
def test_bare_import_is_refused(name):
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f"this folder is the package surogate.{name}" in result.stderr


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    allowed = MAY_IMPORT[layer] | {layer}
    for path in (ROOT / layer).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "surogate":
                assert parts[0] != "torch", f"{path.name} imports torch"
                continue
            below = parts[1] if len(parts) > 1 else ""
            assert below in allowed, f"{layer}/{path.name} imports {name}"


def test_nothing_imports_torch_at_run_time():
    for package in PACKAGES:
        for path in folder_of(package).glob("*.py"):
            roots = {name.split(".")[0] for name in imported(path)}
            assert not roots & {"torch", "transformers", "peft"}, path


def test_environment_variables_are_those_of_the_table():
    table = (ROOT / "docs" / "environment.md").read_text()
    read = set()
    for package in PACKAGES:
        for path in folder_of(package).glob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)):
                is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if is_name and node.value.startswith(("SUROGATE_", "XDG_", "SOURCE_")):
                    read.add(node.value)
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert read == documented
