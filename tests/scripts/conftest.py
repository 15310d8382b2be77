"""Fixtures of the export's tests."""

from pathlib import Path

import pytest

from tests.scripts.export_cases import trained_tensors, write_base, write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", trained_tensors())
