"""Which tensor has which dtype where: in the base, in training, in the checkpoint and in the export.

Published Qwen3.5 weights are bfloat16 but for a float32 A_log and linear_attn.norm.weight in each gated-delta layer.
The master weights that the optimizer updates are float32 unless a config says `model.dtype: bfloat16`, and even then
what the base has in float32 stays in it. The optimizer's moments have their weights' dtype, and a checkpoint holds the
weights as they are. The export rounds once, to the base's dtype of each tensor, so what the base has in float32 keeps
every bit of the training.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from tests.scripts.export_cases import export as export_command
from tests.train.scripted_run import make_config
from train.config import TrainConfig
from train.export.weights import read_weights
from train.model import Policy, load_policy
from train.state import gather_run, read_state, restore, save_run
from train.tiny import write_base
from train.trainer import Trainer
from train.weight_sync import fingerprint

WIDE = ("linear_attn.A_log", "linear_attn.norm.weight")
FULL = "model.language_model."
UPDATE = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole base with the published dtypes; its float32 values are none that bfloat16 has."""
    folder = tmp_path_factory.mktemp("dtypes") / "base"
    write_base(folder, layout="canonical")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor - 1 / 3 if name.endswith(WIDE) else tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dtypes(folder: Path) -> dict[str, str]:
    """The dtype of every tensor by the headers alone."""
    return {name: tensor.dtype for name, tensor in read_weights(folder).tensors.items()}


def settings(folder: Path, base: Path, *more: str) -> TrainConfig:
    return make_config(folder, base, ["loss.kl.mode=off", f"optimizer.lr={UPDATE}", "optimizer.weight_decay=0", *more])


def start(config: TrainConfig, path: Path | None = None) -> tuple[Policy, Trainer]:
    policy = load_policy(config.model, None if path is None else str(path))
    return policy, Trainer(config, policy.model, None, Accelerator(cpu=True))


def save(config: TrainConfig, policy: Policy, trainer: Trainer, step: int) -> Path:
    return save_run(config, step, trainer, policy, "pool", gather_run(trainer, keep=True))


def export(base: Path, checkpoint: Path, out: Path) -> Path:
    assert export_command(base, checkpoint, out) == 0
    return out


def decay(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in policy.model.named_parameters() if name.endswith("A_log")}


def test_without_training_every_dtype_and_every_bit_are_the_bases(base: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, base)
    policy, trainer = start(config)
    checkpoint = save(config, policy, trainer, 0)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert set(dtypes(checkpoint).values()) == {"F32"}

    out = export(base, checkpoint, tmp_path / "out")
    assert dtypes(out) == dtypes(base)
    assert Counter(dtypes(out).values()) == {"BF16": len(dtypes(base)) - 6, "F32": 6}
    assert {name for name, dtype in dtypes(out).items() if dtype == "F32"} == {
        f"{FULL}layers.{layer}.{name}" for layer in range(3) for name in WIDE
    }
    assert (out / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_a_small_update_of_a_decay_survives_every_station(base: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, base)
    policy, trainer = start(config)
    before = {name: p.detach().clone() for name, p in decay(policy).items()}
    for parameter in decay(policy).values():
        parameter.grad = -torch.ones_like(parameter)
    trainer.optimizers.step()  # Adam's first step is the learning rate, whatever the gradient's size
    trained = {name: p.detach().clone() for name, p in decay(policy).items()}
    assert len(trained) == 3
    for name, value in trained.items():
        assert value.dtype == torch.float32
        assert (value - before[name]).tolist() == pytest.approx([UPDATE] * value.numel(), rel=1e-2), name
    trainer.weights = fingerprint(policy.model)
    checkpoint = save(config, policy, trainer, 1)

    again, resumed = start(config, checkpoint)
    restore(resumed, read_state(1, checkpoint, config, "pool"))
    assert {name: p.tolist() for name, p in decay(again).items()} == {n: v.tolist() for n, v in trained.items()}
    (optimizer,) = resumed.optimizers.parts.values()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key.startswith("exp_avg")]
    assert moments
    assert {value.dtype for value in moments} == {torch.float32}

    out = export(base, checkpoint, tmp_path / "out")
    assert dtypes(out) == dtypes(base)
    report = json.loads((out / "export_report.json").read_text())
    changed = [row for row in report["table"] if row["changed"]]
    assert {row["name"] for row in changed} == {name.replace("model.", FULL, 1) for name in trained}
    for loader, spell in ((Qwen3_5ForCausalLM, ""), (Qwen3_5ForConditionalGeneration, "language_model.")):
        served = dict(loader.from_pretrained(out, dtype=torch.float32).named_parameters())
        for name, value in trained.items():
            assert torch.equal(served[name.replace("model.", f"model.{spell}", 1)], value), name


def test_master_weights_in_bfloat16_leave_in_float32_what_the_base_has_in_it(base: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, base, "model.dtype=bfloat16")
    policy, trainer = start(config)
    wanted = {name.replace(FULL, "model."): dtype for name, dtype in dtypes(base).items()}
    assert {n: "F32" if p.dtype == torch.float32 else "BF16" for n, p in policy.model.named_parameters()} == {
        name: wanted[name] for name, _ in policy.model.named_parameters()
    }
    matrix = policy.model.get_submodule("model.layers.0.mlp.up_proj").weight
    for parameter in (*decay(policy).values(), matrix):
        parameter.grad = -torch.ones_like(parameter)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    trainer.optimizers.step()
    for name, value in decay(policy).items():
        assert (value - before[name]).tolist() == pytest.approx([UPDATE] * value.numel(), rel=1e-2), name
    kept = (matrix == before["model.layers.0.mlp.up_proj.weight"]).float().mean()
    assert kept > 0.5, "bfloat16 rounds most of such an update away: why float32 is the default"
    checkpoint = save(config, policy, trainer, 1)
    again, _ = start(config, checkpoint)
    for name, value in decay(again).items():
        assert torch.equal(value, decay(policy)[name]), name
    out = export(base, checkpoint, tmp_path / "out")
    assert dtypes(out) == dtypes(base)
    assert not any("narrower" in line for line in json.loads((out / "export_report.json").read_text())["warnings"])


def test_a_runs_merged_checkpoint_and_its_adapter_give_the_same_export(base: Path, tmp_path: Path) -> None:
    config = settings(tmp_path, base, "model.lora.rank=3", "model.lora.alpha=5")
    policy, trainer = start(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    trainer.weights = fingerprint(policy.model)
    checkpoint = save(config, policy, trainer, 1)
    merged, adapter = export(base, checkpoint, tmp_path / "a"), export(base, checkpoint / "adapter", tmp_path / "b")
    assert (merged / "model.safetensors").read_bytes() == (adapter / "model.safetensors").read_bytes()
    reports = [json.loads((out / "export_report.json").read_text()) for out in (merged, adapter)]
    assert reports[0]["changed"] == reports[1]["changed"] == reports[1]["origins"]["trained"]["tensors"] == 3 * 8 + 7
