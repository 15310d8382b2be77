"""What a user can get wrong: one line, exit code 2, nothing written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import SetupError
from tests.train import scripted_run as scripted
from train.run import main


def _no_model(folder: Path, model: Path) -> list[str]:
    return [f"model.path={folder / 'nowhere'}"]


def _no_tokenizer(folder: Path, model: Path) -> list[str]:
    copy = folder / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((model / name).read_bytes())
    return [f"model.path={copy}"]


def _cut_weights(folder: Path, model: Path) -> list[str]:
    copy = folder / "model"
    shutil.copytree(model, copy)
    os.truncate(copy / "model.safetensors", 5000)
    return [f"model.path={copy}"]


def _no_template(folder: Path, model: Path) -> list[str]:
    copy = folder / "model"
    copy.mkdir()
    for path in model.iterdir():
        if path.name != "chat_template.jinja":
            (copy / path.name).write_bytes(path.read_bytes())
    return [f"model.path={copy}"]


def _in_use(folder: Path, model: Path) -> list[str]:
    (folder / "used").mkdir()
    (folder / "used" / "thesis.txt").write_text("mine")
    return [f"output={folder / 'used'}"]


def _small_pool(folder: Path, model: Path) -> list[str]:
    return ["data.limit=5"]


def _unknown_difficulty(folder: Path, model: Path) -> list[str]:
    return ["data.difficulties=[extreme]"]


def _unknown_mix(folder: Path, model: Path) -> list[str]:
    return ["curriculum.mix={extreme: 2}"]


def _one_rank(folder: Path, model: Path) -> list[str]:
    return ["parallel=fsdp"]


def _no_audit(folder: Path, model: Path) -> list[str]:
    return [f"data.audit={folder / 'audit.json'}"]


BAD_INPUT = [
    (_no_model, "nowhere is neither a folder nor a hub id"),
    (_no_tokenizer, "has no tokenizer"),
    (_cut_weights, r"model\.path: .*model\.safetensors is damaged \(.*copy or download it again"),
    (_no_template, "has no chat template"),
    (_in_use, "holds other files and no run"),
    (_small_pool, "the pool has 5 questions, a step draws 18"),
    (_unknown_difficulty, "no question is 'extreme'"),
    (_unknown_mix, "curriculum.mix: no question is 'extreme'"),
    (_one_rank, "fsdp spreads a model over ranks, and there is one"),
    (_no_audit, r"audit.json cannot be read \(No such file or directory\); write it with python -m eval.audit"),
]


@pytest.mark.parametrize(("prepare", "message"), BAD_INPUT, ids=[function.__name__ for function, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, model_folder: Path, prepare: Callable[[Path, Path], list[str]], message: str
) -> None:
    scripted.shop_pool(tmp_path)
    (tmp_path / "db" / "shop").mkdir(parents=True)
    (tmp_path / "shop.sqlite").rename(tmp_path / "db" / "shop" / "shop.sqlite")
    questions = [{"db_id": "shop", "question": f"q{i}", "query": "SELECT 1", "difficulty": "simple"} for i in range(30)]
    (tmp_path / "q.json").write_text(json.dumps(questions))
    (tmp_path / "c.yaml").write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: {model_folder}}}\n"
        f"data: {{benchmark: questions, questions: {tmp_path / 'q.json'}, databases: {tmp_path / 'db'}}}\n"
    )
    overrides = prepare(tmp_path, model_folder)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(SetupError, match=message) as error:
        main(["--config", str(tmp_path / "c.yaml"), *overrides])
    assert "\n" not in str(error.value)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_ranks_that_cannot_share_the_questions_are_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    (tmp_path / "c.yaml").write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: no/model}}\ndata: {{benchmark: toy}}\nrollout: {{questions: 16}}\n"
    )
    with pytest.raises(SetupError, match=r"rollout\.questions 16 does not divide by 3 ranks"):
        main(["--config", str(tmp_path / "c.yaml")])
