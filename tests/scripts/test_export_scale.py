"""The export at the size of Qwen3.5-2B, with generated weights: what is counted, what it costs, what comes back."""

import filecmp
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.scripts.export_cases import FULL, ROOT, write_aux_files
from tests.train.test_weight_sync import SHAPE, VISION
from train.export.weights import FLOATS, INDEX, header_bytes, read_weights, value_bytes, value_chunks

pytestmark = pytest.mark.slow

TRAINED, VISION_COUNT, MTP_COUNT = (320, 1_881_825_088), (297, 331_416_576), (15, 60_828_160)
ALL = (632, 2_274_069_824)
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
SHARDS = 3
GIB = 1 << 30
DISK = 18 * GIB
CHUNK = 4 << 20

Spec = tuple[str, str, tuple[int, ...]]


def base_specs() -> list[Spec]:
    """(name, dtype, shape) of every tensor of the base, in the order of its classes, then the MTP head."""
    config = Qwen3_5Config(text_config=SHAPE, vision_config=VISION, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(config)
    model.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} | mtp_shapes()
    return [(name, "F32" if name.endswith(FLOAT32) else "BF16", shape) for name, shape in shapes.items()]


def mtp_shapes() -> dict[str, tuple[int, ...]]:
    """The multi-token-prediction head, which transformers has no class for: one full-attention layer and its inputs."""
    hidden, inner, head = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * head, SHAPE["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 2 * hidden),
        "norm": (hidden,),
        "pre_fc_norm_embedding": (hidden,),
        "pre_fc_norm_hidden": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
        "layers.0.self_attn.q_proj": (2 * queries, hidden),
        "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.self_attn.q_norm": (head,),
        "layers.0.self_attn.k_norm": (head,),
    }
    return {f"mtp.{name}.weight": shape for name, shape in shapes.items()}


def nbytes(spec: Spec) -> int:
    return torch.Size(spec[2]).numel() * FLOATS[spec[1]].itemsize


def write_file(path: Path, specs: list[Spec], values: Callable[[Spec], Iterator[torch.Tensor]]) -> None:
    with open(path, "wb") as file:
        file.write(header_bytes([(*spec, nbytes(spec)) for spec in specs], {"format": "pt"}))
        for spec in specs:
            for chunk in values(spec):
                file.write(value_bytes(chunk.to(FLOATS[spec[1]])))


def write_shards(folder: Path, specs: list[Spec], values: Callable[[Spec], Iterator[torch.Tensor]]) -> None:
    """About equally large shards, and their index."""
    sizes = [nbytes(spec) for spec in specs]
    total, weight_map = sum(sizes), {}
    parts: list[list[Spec]] = [[] for _ in range(SHARDS)]
    for spec, before in zip(specs, accumulate(sizes, initial=0), strict=False):
        parts[before * SHARDS // total].append(spec)
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        # Wider values first, as the format's library lays them out.
        write_file(folder / name, sorted(part, key=lambda spec: spec[1] != "F32"), values)
        weight_map |= {spec[0]: name for spec in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def pseudo_random(spec: Spec) -> Iterator[torch.Tensor]:
    """Values of a scale of 0.02, other ones for every tensor: from one block, begun at a place that its name gives."""
    start, left = sum(map(ord, spec[0])) * 4099 % CHUNK, torch.Size(spec[2]).numel()
    block = torch.cat([_BLOCK[start:], _BLOCK[:start]])
    while left:
        yield block[:left]
        left -= min(left, CHUNK)


_BLOCK = 0.02 * torch.randn(CHUNK, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Measured:
    """How a script ended: what it wrote as JSON, its time and the most memory that it held."""

    report: dict[str, Any]
    seconds: float
    peak_bytes: int


def measured(script: str, arguments: list[str], json_file: Path, code: int = 0) -> Measured:
    """Run one of the scripts, which must end with `code`; says on the terminal what it cost."""
    started = time.monotonic()
    with open(json_file.parent.with_suffix(".log"), "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / script), *arguments], stdout=log, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        assert process.returncode == code, log.read().decode()
    seconds, peak = time.monotonic() - started, usage.ru_maxrss * 1024
    print(f"{script}: {seconds:.0f} s, peak memory {peak / GIB:.2f} GiB")
    return Measured(json.loads(json_file.read_text()), seconds, peak)


def export_by_command(base: Path, checkpoint: Path, out: Path) -> Measured:
    arguments = ["--verify", "--base", str(base), "--checkpoint", str(checkpoint), "--out", str(out)]
    return measured("export_merged.py", arguments, out / "export_report.json")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("scale") / "base"
    if (free := shutil.disk_usage(folder.parent).free) < DISK:
        pytest.skip(f"needs {DISK / GIB:.0f} GiB of disk, {free / GIB:.0f} are free")
    folder.mkdir()
    write_shards(folder, base_specs(), pseudo_random)
    write_aux_files(folder)
    config = Qwen3_5Config(text_config=SHAPE, vision_config=VISION, tie_word_embeddings=True)
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    config.to_json_file(folder / "config.json")
    yield folder
    shutil.rmtree(folder.parent)


def language(specs: list[Spec], dtype: str | None = None) -> list[Spec]:
    """The language model's own, under the text class's names; in one dtype, or in the base's."""
    return [(name.replace(FULL, "model."), dtype or own, shape) for name, own, shape in specs if name.startswith(FULL)]


def test_a_trained_checkpoint_of_the_real_size_is_exported_within_little_memory(base: Path) -> None:
    checkpoint, out = base.parent / "checkpoint", base.parent / "out"
    checkpoint.mkdir()

    def trained(spec: Spec) -> Iterator[torch.Tensor]:
        original = (spec[0].replace("model.", FULL, 1), *spec[1:])
        return (1.01 * chunk for chunk in pseudo_random(original))

    write_file(checkpoint / "model.safetensors", language(base_specs(), "F32"), trained)
    done = export_by_command(base, checkpoint, out)
    report = done.report

    assert (report["tensors"], report["parameters"], report["verified"], report["changed"]) == (*ALL, True, 320)
    counted = {key: (group["tensors"], group["parameters"]) for key, group in report["origins"].items()}
    assert counted == {"trained": TRAINED, "base vision": VISION_COUNT, "base MTP": MTP_COUNT}
    assert report["origins"]["trained"]["dtypes"] == {"BF16": 284, "F32": 36}
    written, original = read_weights(out), read_weights(base)
    assert written.tensors.keys() == original.tensors.keys()
    assert json.loads((out / INDEX).read_bytes())["metadata"]["total_size"] == written.tensor_bytes
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()
    for name in ("layers.23.self_attn.v_proj.weight", "layers.0.linear_attn.A_log", "norm.weight"):
        tensor = written.tensors[FULL + name]
        wanted = trained((f"model.{name}", "F32", tensor.shape))
        for ours, theirs in zip(_flat(value_chunks(tensor)), _flat(wanted), strict=True):
            assert torch.equal(ours, theirs.to(ours.dtype)), name
    largest = max(tensor.nbytes for tensor in read_weights(checkpoint).tensors.values())
    assert done.peak_bytes < largest + 2 * GIB

    compared = measured(
        "compare_checkpoints.py",
        [str(checkpoint), str(out), "--json", str(out / "compared.json")],
        out / "compared.json",
        code=1,
    )
    assert compared.peak_bytes < largest + 2 * GIB
    status = compared.report["all"]["status"]
    assert (status["equal"], status["rounded"], status["only in B"]) == (36, 284, 312)
    shutil.rmtree(checkpoint)
    shutil.rmtree(out)


def _flat(chunks: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.cat(list(chunks)).split(CHUNK))


def test_no_training_gives_the_bases_weight_files_bit_for_bit(base: Path) -> None:
    checkpoint, out = base.parent / "untrained", base.parent / "same"
    checkpoint.mkdir()

    def own(spec: Spec) -> Iterator[torch.Tensor]:
        return pseudo_random((spec[0].replace("model.", FULL, 1), *spec[1:]))

    specs = sorted(language(base_specs()), key=lambda spec: spec[1] != "F32")
    write_file(checkpoint / "model.safetensors", specs, own)
    done = export_by_command(base, checkpoint, out)
    assert (done.report["verified"], done.report["changed"]) == (True, 0)
    files = [path.name for path in chain(base.glob("*.safetensors"), [base / INDEX])]
    assert len(files) == SHARDS + 1
    same, different, unreadable = filecmp.cmpfiles(base, out, files, shallow=False)
    assert (sorted(same), different, unreadable) == (sorted(files), [], [])
    shutil.rmtree(checkpoint)
    shutil.rmtree(out)


def test_an_adapter_over_every_matrix_is_merged_within_little_memory(base: Path) -> None:
    adapter, out, rank = base.parent / "adapter", base.parent / "merged", 16
    adapter.mkdir()
    matrices = [spec for spec in base_specs() if FULL in spec[0] and len(spec[2]) == 2 and "embed" not in spec[0]]
    assert len(matrices) == 18 * 8 + 6 * 7
    halves: list[Spec] = []
    for name, _, (rows, columns) in matrices:
        live = "base_model.model." + name.replace(FULL, "model.").removesuffix(".weight")
        halves += [(f"{live}.lora_A.weight", "F32", (rank, columns)), (f"{live}.lora_B.weight", "F32", (rows, rank))]
    write_file(adapter / "adapter_model.safetensors", halves, pseudo_random)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    done = export_by_command(base, adapter, out)
    assert (done.report["tensors"], done.report["verified"], done.report["changed"]) == (632, True, len(matrices))
    assert done.report["origins"]["base language"]["tensors"] == 320 - len(matrices)
    largest = max(tensor.nbytes for tensor in read_weights(base).tensors.values())
    assert done.peak_bytes < largest + 2 * GIB
    shutil.rmtree(adapter)
    shutil.rmtree(out)
