"""The shell scripts are linted, make the environment once, and say in one line what they can't use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL_FILES = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("slurm/*.sh"), ROOT / ".ci" / "run"])
ENSURE = ["bash", "-euo", "pipefail", "-c", ". scripts/_env.sh; ensure_env; command -v python"]


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck(path: Path) -> None:
    command = [str(Path(sys.executable).with_name("shellcheck")), "-x", str(path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that holds nothing but what `ensure_env` needs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_env.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("# first\n")
    return tmp_path


def fake_python(folder: Path, body: str) -> str:
    path = folder / "fakepython"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def working_python(folder: Path) -> str:
    """A Python whose venv module makes an environment that only notes each installation in `installs`, slowly."""
    inner = folder / "inner"
    inner.write_text(
        '#!/bin/sh\ncase "$*" in\n*"pip --version"*) exit 0;;\n'
        f'*"pip install"*) sleep 0.2; echo "$*" >> {folder}/installs; exit 0;;\nesac\n'
        f'exec {sys.executable} "$@"\n'
    )
    inner.chmod(0o755)
    making = f'if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp {inner} "$3/bin/python"; exit 0; fi'
    return fake_python(folder, f'{making}\nexec {sys.executable} "$@"')


def ensure_env(checkout: Path, python: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": python}
    return subprocess.run(ENSURE, cwd=checkout, env=env, capture_output=True, text=True, timeout=60)


def installs(checkout: Path) -> int:
    path = checkout / "installs"
    return path.read_text().count("\n") if path.exists() else 0


def test_the_environment_is_made_once(checkout: Path) -> None:
    python = working_python(checkout)
    first = ensure_env(checkout, python)
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == f"{checkout}/.venv/bin/python"
    assert ensure_env(checkout, python).stdout == f"{checkout}/.venv/bin/python\n"
    assert installs(checkout) == 1


def test_a_changed_pyproject_is_installed_and_other_packages_stay(checkout: Path) -> None:
    python = working_python(checkout)
    ensure_env(checkout, python)
    (checkout / ".venv" / "own-package").touch()
    (checkout / "pyproject.toml").write_text("# second\n")
    assert ensure_env(checkout, python).returncode == 0
    assert installs(checkout) == 2
    assert (checkout / ".venv" / "own-package").exists()


def test_a_failed_installation_is_said_and_not_taken_for_a_finished_one(checkout: Path) -> None:
    python = working_python(checkout)
    inner = checkout / "inner"
    good = inner.read_text()
    inner.write_text(good.replace("exit 0;;\nesac", "echo no such package; exit 1;;\nesac"))
    failed = ensure_env(checkout, python)
    assert failed.returncode == 2
    reason, line = failed.stderr.splitlines()
    assert reason == "no such package"
    assert line.startswith("error: the installation failed")
    inner.write_text(good)
    assert ensure_env(checkout, python).returncode == 0


@pytest.mark.parametrize("damage", ["interrupted", "empty folder", "no interpreter"])
def test_a_half_made_environment_is_made_again(checkout: Path, damage: str) -> None:
    python = working_python(checkout)
    ensure_env(checkout, python)
    venv = checkout / ".venv"
    if damage == "interrupted":
        (venv / ".making").touch()
    elif damage == "no interpreter":
        (venv / "bin" / "python").unlink()
    else:
        shutil.rmtree(venv)
        venv.mkdir()
    result = ensure_env(checkout, python)
    assert result.returncode == 0, result.stderr
    assert installs(checkout) == 2
    assert not (venv / ".making").exists()


def test_two_starts_at_once_install_once(checkout: Path) -> None:
    env = {**os.environ, "PYTHON": working_python(checkout)}
    both = [subprocess.Popen(ENSURE, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert installs(checkout) == 1, outputs


def test_a_missing_python_is_one_line(checkout: Path) -> None:
    result = ensure_env(checkout, "no-such-python")
    remedy = "install one or set PYTHON=/path/to/python3.11"
    assert result.returncode == 2
    assert result.stderr == f"error: Python 3.11 or newer is needed, found: none; {remedy}\n"
    assert not (checkout / ".venv").exists()


def test_an_old_python_is_one_line(checkout: Path) -> None:
    result = ensure_env(checkout, fake_python(checkout, 'case "$2" in *"%d.%d"*) echo 3.9;; *) exit 1;; esac'))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "fakepython=3.9" in result.stderr


def test_a_python_without_venv_is_one_line(checkout: Path) -> None:
    body = 'case "$2" in *"%d.%d"*) echo 3.12;; *venv*) exit 1;; *) exit 0;; esac'
    result = ensure_env(checkout, fake_python(checkout, body))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "apt install python3.12-venv" in result.stderr
