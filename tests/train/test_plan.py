"""The dry run: sizes by hand for the real shape, every problem shown, nothing loaded and nothing written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from shared.config import load_config
from shared.errors import SetupError
from train.config import TrainConfig
from train.memory import Item, Shape, memory_plan, model_shape, peaks
from train.plan import Assumptions, measured_seconds, step_seconds
from train.run import main

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "cases"
GIB = 2**30


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Shape:
    folder = tmp_path_factory.mktemp("config")
    shutil.copy(CASES / "qwen35_2b_config.json", folder / "config.json")
    return model_shape(AutoConfig.from_pretrained(folder))


@pytest.fixture(scope="module")
def curriculum() -> TrainConfig:
    return load_config(ROOT / "configs" / "grpo_curriculum.yaml", TrainConfig)


def _sizes(items: list[Item]) -> dict[str, int]:
    return {item.name: item.size for item in items}


def test_the_published_shape_has_the_published_count(shape: Shape) -> None:
    assert shape.parameters == 1_881_825_088
    assert (shape.hidden, shape.vocabulary, len(shape.layers)) == (2048, 248_320, 24)
    # 6 attention layers, keys and values, 2 heads of 256.
    assert shape.cache_width == 6 * 2 * 2 * 256
    # 18 linear layers: 16 heads of 128 x 128, and 4 positions of queries, keys and values.
    assert shape.state_values == 18 * (16 * 128 * 128 + 4 * 3 * 2048)


def test_memory_of_the_curriculum_run(shape: Shape, curriculum: TrainConfig) -> None:
    items = memory_plan(curriculum, shape, ranks=3)
    sizes = _sizes(items)
    n = shape.parameters
    assert sizes["weights"] == sizes["gradients"] == sizes["reference"] == 4 * n
    assert sizes["optimizer"] == 8 * n
    assert sizes["autocast copies"] == 2 * n
    assert sizes["logits chunk"] == 512 * 248_320 * (4 + 4 + 2) + 248_320 * 2048 * 6
    # 18 questions over 3 ranks, 8 candidates, all of them at the whole budget.
    assert sizes["KV cache and states"] == 48 * (24_576 * 12_288 + shape.state_values * 4)
    assert sizes["vLLM's weights"] == 2 * n
    engine = sizes["KV cache and states"] + sizes["vLLM's weights"]
    update, rollout = peaks(items)
    assert update == sum(sizes.values()) - engine, "vLLM sleeps while the trainer updates"
    assert rollout == update - sizes["gradients"] - sizes["activations"] - sizes["logits chunk"] + engine
    assert 40 * GIB < update < 80 * GIB, "the card's run fitted GPUs of 80 GB"


CHANGES = [
    ({"parallel": "fsdp"}, "weights", 4 * 1_881_825_088 // 3),
    ({"parallel": "fsdp"}, "optimizer", 8 * 1_881_825_088 // 3),
    ({"parallel": "fsdp"}, "reference", 4 * 1_881_825_088 // 3),
    ({"optimizer": {"name": "adamw8bit"}}, "optimizer", 2 * 1_881_825_088 * 65 // 64),
    # 6 attention layers: queries with their gate, 2048 -> 2 x 8 x 256; outputs 2048 -> 2048.
    ({"model": {"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}}, "adapters", 4 * 4 * 6 * (6144 + 4096)),
    ({"model": {"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}}, "optimizer", 8 * 4 * 6 * (6144 + 4096)),
    ({"model": {"lora": {}}}, "reference", None),
    ({"loss": {"kl": {"mode": "adaptive", "offload": True}}}, "reference", 0),
    ({"loss": {"kl": {"mode": "off"}}}, "reference", None),
    ({"model": {"autocast": "none"}}, "autocast copies", None),
    ({"model": {"dtype": "bfloat16"}}, "weights", 2 * 1_881_825_088),
    ({"rollout": {"engine": "hf"}}, "vLLM's weights", None),
    ({"rollout": {"concurrency": 2}}, "KV cache and states", 2 * (24_576 * 12_288 + 18 * (2**18 + 24_576) * 4)),
]


@pytest.mark.parametrize(("change", "name", "size"), CHANGES, ids=[f"{c}-{name}" for c, name, _ in CHANGES])
def test_the_plan_follows_the_config(
    shape: Shape, curriculum: TrainConfig, change: dict[str, Any], name: str, size: int | None
) -> None:
    data = json.loads(curriculum.model_dump_json())
    for section, values in change.items():
        data[section] = data[section] | values if isinstance(values, dict) else values
    changed = TrainConfig.model_validate_json(json.dumps(data))
    held = _sizes([item for item in memory_plan(changed, shape, ranks=3) if item.update or item.rollout])
    assert held.get(name, 0) == (size or 0)


def test_checkpointing_pays_and_muon_takes_one_moment(shape: Shape, curriculum: TrainConfig) -> None:
    model = curriculum.model.model_copy(update={"gradient_checkpointing": False})
    without = _sizes(memory_plan(curriculum.model_copy(update={"model": model}), shape, 3))["activations"]
    assert without > 3 * _sizes(memory_plan(curriculum, shape, 3))["activations"]
    optimizer = curriculum.optimizer.model_copy(update={"name": "muon"})
    muon = _sizes(memory_plan(curriculum.model_copy(update={"optimizer": optimizer}), shape, 3))["optimizer"]
    assert muon == 4 * (2 * shape.parameters - shape.matrices)
    assert 1_300_000_000 < shape.matrices < shape.parameters - 248_320 * 2048


def test_vllm_keeps_its_memory_unless_it_sleeps(shape: Shape, curriculum: TrainConfig) -> None:
    def at_update(sleep: bool) -> int:
        vllm = curriculum.rollout.vllm.model_copy(update={"sleep": sleep})
        rollout = curriculum.rollout.model_copy(update={"vllm": vllm})
        return peaks(memory_plan(curriculum.model_copy(update={"rollout": rollout}), shape, 3))[0]

    ours = 2 * shape.parameters + 48 * (24_576 * 12_288 + shape.state_values * 4)
    assert at_update(False) - at_update(True) == ours
    assert at_update(True) == peaks(memory_plan(curriculum, shape, 3))[0]


def test_servers_hold_the_caches_instead_of_the_ranks(shape: Shape, curriculum: TrainConfig) -> None:
    rollout = curriculum.rollout.model_copy(update={"engine": "server"})
    names = {item.name for item in memory_plan(curriculum.model_copy(update={"rollout": rollout}), shape, 3)}
    assert names == {item.name for item in memory_plan(curriculum, shape, 3)} - {
        "vLLM's weights",
        "KV cache and states",
    }


def test_time_by_hand(shape: Shape, curriculum: TrainConfig) -> None:
    rollout, update = step_seconds(curriculum, shape, Assumptions(3, 6000, 100.0, 1000.0))
    assert rollout == 48 * 3000 / 1000
    assert update == pytest.approx(10 * (shape.matrices + 248_320 * 2048) * 48 * 6000 / 1e14)


def test_a_run_s_own_figures_replace_the_assumptions(tmp_path: Path) -> None:
    assert measured_seconds(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "seconds": 10.0}\n{"step": 1, "seconds": 20.0}\n')
    assert measured_seconds(tmp_path) == (15.0, 2, 2)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "sec')
    assert measured_seconds(tmp_path) is None


def _arguments(folder: Path, *more: str) -> list[str]:
    path = folder / "c.yaml"
    path.write_text(
        f"output: {folder / 'run'}\nmodel: {{path: {folder / 'model'}}}\n"
        "data: {benchmark: toy, toy_databases: 3, toy_questions: 30, difficulties: [simple, hard]}\n"
        "validation: {every: 100, benchmark: toy, toy_databases: 2, toy_questions: 10, sample: 6}\n"
    )
    return ["--config", str(path), "--dry-run", "--ranks", "3", *more]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of the real shape whose weights are a file without tensors: loading them would fail."""
    (tmp_path / "model").mkdir()
    shutil.copy(CASES / "qwen35_2b_config.json", tmp_path / "model" / "config.json")
    (tmp_path / "model" / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    (tmp_path / "model" / "tokenizer.json").touch()
    return tmp_path


def test_a_dry_run_says_it_all_and_leaves_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(_arguments(folder, "rollout.questions=6")) == 0
    said = capsys.readouterr().out
    for text in ("lr: 1.0e-05", "simple", "hard", "1,881,825,088 parameters", "KV cache", "24,576"):
        assert text in said
    assert "training pool: 30 questions over 3 databases; " in said
    assert "left after data.difficulties" in said
    assert "1,000 steps: " in said
    assert "11 validations of 12 episodes" in said
    assert not (folder / "run").exists()


def test_all_problems_are_shown_and_the_plan_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model" / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="difficulties: no question is 'extreme'"):
        main(_arguments(folder, "rollout.questions=5", "data.difficulties=[extreme]"))
    said = capsys.readouterr().out
    assert "also: rollout.questions 5 does not divide by 3 ranks" in said
    assert "has no weights" in said
    assert "1,881,825,088 parameters" in said


def test_without_a_model_config_the_rest_is_still_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / "model")
    with pytest.raises(SetupError, match=r"model\.path.*is neither a folder nor a hub id"):
        main(_arguments(folder, "rollout.questions=6"))
    assert "mean quantile drawn" in capsys.readouterr().out
