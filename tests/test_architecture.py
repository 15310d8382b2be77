"""The arrows between the packages, what may import torch, and the house rules a reader relies on.

Read from the source (AST), so that an import inside a function counts as well.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("shared", "train", "eval")
SOURCES = sorted(path for package in (*PACKAGES, "scripts") for path in (ROOT / package).rglob("*.py"))
HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "trl",
    "accelerate",
    "datasets",
    "peft",
    "safetensors",
    "tokenizers",
    "torchvision",
}

# Floor of shared -> what it may stand on, itself aside. Everything may use errors, cli, files and text.
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "cli": set(),
    "files": set(),
    "text": set(),
    "config": set(),
    "database": set(),
    "sql": {"database", "config"},
    "tools": {"sql", "database", "config"},
    "data": {"sql", "database", "config"},
    "engines": set(),
    "chat": {"config"},
    "episode": {"chat", "config", "data", "database", "engines", "sql", "tools"},
    "runner": {"chat", "config", "data", "database", "engines", "episode", "sql", "tools"},
}


def module_name(path: Path) -> str:
    """Dotted name of a source file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, lazily and for type checking included: an arrow is an arrow."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_arrows_between_packages(path: Path) -> None:
    owner = path.relative_to(ROOT).parts[0]
    forbidden = {"shared": {"train", "eval"}, "train": {"eval"}, "eval": {"train"}, "scripts": set()}[owner] | {"tests"}
    wrong = [name for name in imports(path) if name.split(".")[0] in forbidden]
    assert not wrong, f"{module_name(path)} imports {wrong}"


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.relative_to(ROOT).parts[0] == "shared"], ids=module_name
)
def test_floors_inside_shared(path: Path) -> None:
    here = module_name(path).split(".")[1:2]
    if not here:  # shared/__init__.py
        assert not list(imports(path))
        return
    allowed = FLOORS[here[0]] | {here[0], "errors", "cli", "files", "text"}
    used = {name.split(".")[1] for name in imports(path) if name.startswith("shared.")}
    assert used <= allowed, f"{module_name(path)} stands on {sorted(used - allowed)}, which lies above it"


def test_every_part_of_shared_has_a_floor() -> None:
    parts = {path.stem if path.is_file() else path.name for path in (ROOT / "shared").iterdir()}
    assert parts - {"__init__", "__pycache__"} <= set(FLOORS)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_heavy_libraries_stay_in_their_places(path: Path) -> None:
    place = path.relative_to(ROOT)
    engine = place.parent == Path("shared/engines") and place.stem not in {"__init__", "base", "scripted", "openai"}
    heavy_scripts = {Path("scripts/export_merged.py"), Path("scripts/bench/trainer.py")}
    if engine or place.parts[0] == "train" or place in heavy_scripts:
        return
    wrong = sorted({name for name in imports(path) if name.split(".")[0] in HEAVY})
    assert not wrong, f"{place} imports {wrong}"


@pytest.mark.parametrize(
    "name",
    [
        "shared.tools.protocol",
        "shared.tools.executor",
        "shared.sql.results",
        "eval.stats",
        "eval.scorers",
        "eval.served",
        "eval.agent",
    ],
)
def test_light_modules_import_fast_and_without_torch(name: str) -> None:
    code = (
        f"import sys, time; start = time.perf_counter(); import {name}; took = time.perf_counter() - start\n"
        f"heavy = sorted({HEAVY!r} & set(sys.modules)); print(took); sys.exit(f'{{heavy}} loaded' if heavy else 0)"
    )
    # The best of three: the first one may have to write byte code, and another process may have the core.
    best = float("inf")
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        best = min(best, float(result.stdout))
        if best < 1.0:
            return
    pytest.fail(f"import {name} took {best:.2f} s")


def tracked_files() -> list[Path]:
    """The files git knows and that are there; skips outside a checkout."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_source_file_is_too_long() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked_files()
        if path.suffix in {".py", ".sh"} and (lines := path.read_text().count("\n")) > 400
    }
    assert not long


def test_no_leftovers_and_no_machine_paths() -> None:
    # Put together here so that this file doesn't find itself.
    words = [
        "TO" + "DO",
        "FIX" + "ME",
        "/wo" + "rk/",
        "/tmp" + "/w/",
        "/ro" + "ot/",
        "/ho" + "me/",
        "../" + "shared",
    ]
    found = []
    for path in tracked_files():
        place = str(path.relative_to(ROOT))
        if place == ".ci/run":  # the one file that may look beside the checkout
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{place}: {word}" for word in words if word in text]
    assert not found
