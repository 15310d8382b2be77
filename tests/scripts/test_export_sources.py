"""Where a base and a checkpoint can come from: the hub's cache without a network, and shards that must be joined."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shared.errors import SetupError
from tests.scripts.export_cases import FULL, N_TRAINED, ROOT, Tensors, export, read_all, trained_tensors
from train.export.sources import model_folder

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(home: Path, hub_id: str, folder: Path) -> Path:
    """Lay a model out as the hub's client keeps it; returns the snapshot."""
    repository = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    return Path(shutil.copytree(folder, repository / "snapshots" / REVISION))


def run_offline(home: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The command as a user without a network has it; the client reads its environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")}
    environment = kept | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "scripts/export_merged.py", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_hub_ids_are_found_in_the_cache_without_a_network(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    snapshot = put_in_cache(home, "owner/base-2B", base)
    put_in_cache(home, "someone/trained", checkpoint)
    result = run_offline(home, "--base", "owner/base-2B", "--checkpoint", "someone/trained", "--out", str(out))
    assert result.returncode == 0, result.stderr
    report = json.loads((out / "export_report.json").read_text())
    assert (report["base"], report["changed"], report["verified"]) == (str(snapshot), N_TRAINED, True)
    assert report["card"]["base"]["hub_id"] == "owner/base-2B"
    assert report["card"]["base"]["revision"] == REVISION

    for flags in (
        ("--base", "owner/other", "--checkpoint", str(checkpoint)),
        ("--base", str(base), "--checkpoint", "owner/other"),
    ):
        result = run_offline(home, *flags, "--out", str(tmp_path / "more"))
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith(f"error: {flags[flags.index('owner/other') - 1]} owner/other is no folder here")
        assert "hf download owner/other" in result.stderr
        assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("name", ["no folder", "a/b/c", "./x/y", "/nowhere/x", "owner/"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(SetupError, match=r"--base .* is neither a folder nor a hub id"):
        model_folder(name, "--base")


@pytest.fixture
def sharded(tmp_path: Path) -> tuple[Path, Tensors]:
    """What accelerate leaves of an FSDP run with SHARDED_STATE_DICT: pieces of the model and of the optimizer."""
    folder, tensors = tmp_path / "step 10", trained_tensors()
    folder.mkdir()
    for name, state in (("pytorch_model_fsdp_0", {"model": tensors}), ("optimizer_0", {"optimizer": tensors})):
        dcp.save(state, checkpoint_id=folder / name, no_dist=True)
    return folder, tensors


@pytest.mark.parametrize("inner", ["", "pytorch_model_fsdp_0"])
def test_fsdp_shards_are_refused_with_the_command_that_joins_them(
    base: Path, tmp_path: Path, sharded: tuple[Path, Tensors], inner: str
) -> None:
    folder, tensors = sharded
    with pytest.raises(SetupError, match="not whole tensors; join them first: accelerate merge-weights") as caught:
        export(base, folder / inner, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    if inner:
        return
    program, *arguments = shlex.split(re.sub(r".*join them first: ", "", str(caught.value)))
    assert program == "accelerate"
    subprocess.run([sys.executable, "-m", "accelerate.commands.accelerate_cli", *arguments], check=True, cwd=tmp_path)
    assert export(base, Path(arguments[-1]), tmp_path / "out") == 0
    got = read_all(tmp_path / "out")
    for name, tensor in tensors.items():
        written = got[name.replace("model.", FULL, 1)]
        assert torch.equal(written, tensor.to(written.dtype)), name
