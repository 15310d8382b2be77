"""The command on the real parts, nothing scripted: tiny Qwen3.5 base in the canonical layout, toy data, HF engine."""

import json
from pathlib import Path

import pytest

from shared.errors import SetupError
from train.model import load_model
from train.run import main
from train.selection import read_validation
from train.tiny import write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    write_base(folder, seed=0, layout="canonical")
    return folder


def _config(folder: Path, base: Path) -> list[str]:
    path = folder / "c.yaml"
    path.write_text(
        f"output: {folder / 'run'}\nsteps: 2\ndevice: cpu\nmodel: {{path: {base}}}\n"
        "data: {benchmark: toy, toy_databases: 4, toy_questions: 24}\n"
        # All groups are kept: a random model has no rewards to tell apart, but its steps must be whole.
        "reward: {group_filter: 'off'}\n"
        "rollout: {questions: 2, candidates: 3, max_turns: 2, max_new_tokens: 24, max_tokens: 600}\n"
        "checkpoint: {every: 1, keep: 1}\n"
        "validation: {every: 1, benchmark: toy, toy_databases: 2, toy_questions: 4, sample: 2}\n"
    )
    return ["--config", str(path)]


def test_two_steps_and_a_resume(tmp_path: Path, base: Path) -> None:
    arguments = _config(tmp_path, base)
    assert main([*arguments, "steps=1", "planned_steps=2"]) == 0
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        # Decoding with a cache, padded on the left, against one forward padded on the right.
        assert line["gap_mean"] < 1e-4
        assert line["train_tokens"] > 0
        assert line["empty"] == 0
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-9)
    last = tmp_path / "run" / "checkpoint-step-2"
    validations = read_validation(tmp_path / "run")
    assert [line["step"] for line in validations] == [0, 1, 2]
    assert all(line[mode]["questions"] == 2 for line in validations for mode in ("withheld", "full"))
    # Sampled alike at each step, a random model is right about nothing: the first one stays the best, beside the last.
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint*")) == ["checkpoint-step-1", last.name]
    assert (tmp_path / "run" / "best").resolve() == tmp_path / "run" / "checkpoint-step-1"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json", "train_state.pt"):
        assert (last / name).is_file()


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path, base: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    from train.config import ModelConfig

    with pytest.raises(SetupError, match=r"lacks 1 weights of its model, model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelConfig(path=str(tmp_path)))
