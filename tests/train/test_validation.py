"""What a validation measures, which checkpoint it selects, and that nothing of it is lost or done twice."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.data.example import Example
from shared.episode import EpisodeRecord, TurnRecord
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox
from tests.train import scripted_run as scripted
from tests.train.scripted_run import assert_same_run, metrics
from train.checkpoint import MARKER, apply_retention, checkpoint_folder, list_checkpoints
from train.loop import run_training
from train.rollout import Scorer
from train.selection import VALIDATION, best_line, publish_best, read_validation
from train.stopping import EXIT_REQUEUE, STOP_FILE, StopFlag
from train.validation import (
    HeldOut,
    load_held_out,
    sample_questions,
    validation_config,
    validation_line,
    validation_sums,
)

VALIDATED = ("validation.benchmark=toy", "validation.every=2", "checkpoint.every=3", "checkpoint.keep=1")


def _examples(folder: Path, n: int = 6) -> list[Example]:
    examples = scripted.shop_pool(folder).examples
    return [Example(f"h{i}", "shop", f"held out {i}?", examples[i].gold_sql, examples[i].database) for i in range(n)]


def _record(example: Example, sql: str | None, **more: Any) -> EpisodeRecord:
    values: dict[str, Any] = {"origin": "submitted" if sql else "none", "ended": "submitted", "error": None} | more
    turn = TurnRecord("", 2, 1, "stop", True, None, 0, False, [])
    return EpisodeRecord(
        example.question_id, "shop", "full", 0, sql, values["origin"], values["ended"], [turn], [1, 2, 3], [0, 0, 1],
        [0.0, 0.0, -1.0], 2, ["w"], values["error"],
    )  # fmt: skip


def test_figures_by_hand(tmp_path: Path, model_folder: Path) -> None:
    a, b, c, d, e = _examples(tmp_path, 5)
    empty = Example("empty", "shop", "?", "SELECT id FROM item WHERE id > 99", a.database)
    broken = Example("broken", "shop", "?", "SELECT nothing FROM nowhere", a.database)
    pairs = [
        (a, _record(a, a.gold_sql)),
        (b, _record(b, "SELECT id FROM item")),
        (c, _record(c, "SELECT nothing FROM nowhere", origin="final_text")),
        (d, _record(d, None)),
        # BIRD's rule counts an empty result that is expected to be empty.
        (empty, _record(empty, "SELECT 1 WHERE 0", origin="fallback")),
        (broken, _record(broken, "SELECT 1")),
        (e, _record(e, None, ended="error", error="ours")),
    ]
    with Sandbox(1) as sandbox:
        sums = validation_sums(pairs, Scorer(scripted.make_config(tmp_path, model_folder), sandbox), 2)
    assert sums["questions"] == 5
    assert (sums["official"], sums["executes"], sums["submitted"], sums["fallback"]) == (2, 3, 2, 1)
    assert (sums["errors"], sums["gold_fails"]) == (1, 1)
    line = validation_line(7, HeldOut("BIRD dev", [a, b], 1534, "k"), {"withheld": sums, "full": {}}, "w", 1.0)
    assert line["score"] == line["withheld"]["official"] == 0.4
    assert line["full"]["questions"] == 0
    assert line["selected_on"] == "official accuracy on BIRD dev (2 of 1,534 questions), schema withheld"


def test_the_sample_depends_on_seed_and_ids_alone(tmp_path: Path) -> None:
    examples = list(scripted.shop_pool(tmp_path, 40).examples)
    chosen = sample_questions(examples, 10, seed=3)
    assert chosen == [example for example in examples if example in chosen], "in the set's order"
    ids = {example.question_id for example in chosen}
    assert ids == {example.question_id for example in sample_questions(examples[::-1], 10, seed=3)}
    assert ids < {example.question_id for example in sample_questions(examples, 15, seed=3)}
    assert ids != {example.question_id for example in sample_questions(examples, 10, seed=4)}
    assert sample_questions(examples, 0, seed=3) == examples == sample_questions(examples, 99, seed=3)


def test_a_set_that_was_trained_on_is_refused(tmp_path: Path, model_folder: Path) -> None:
    config = scripted.make_config(
        tmp_path, model_folder, [*VALIDATED, "validation.toy_questions=12", "validation.toy_databases=3"]
    )
    lines: list[str] = []
    held_out = load_held_out(config, [], lines.append)
    assert held_out is not None
    assert lines[0].startswith("validation: held-out questions (12 of 12 questions), read 12 questions over")
    with pytest.raises(SetupError, match="12 of its questions are in the training pool"):
        load_held_out(config, held_out.examples)


def test_the_evaluation_s_sampling_within_the_run_s_budgets(tmp_path: Path, model_folder: Path) -> None:
    config = validation_config(scripted.make_config(tmp_path, model_folder), "full")
    assert (config.mode, config.max_turns, config.max_tokens, config.fallback) == ("full", 2, 8000, True)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.6, 0.95, 20)


def _run(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, scores: Sequence[int], *overrides: str
) -> tuple[int, list[int]]:
    """A scripted run whose n-th validation in a mode counts `scores[n]` right answers; the exit code and the steps."""
    config = scripted.make_config(folder, model, [*VALIDATED, *overrides])
    held_out = HeldOut("a set", _examples(folder), 60, "key")
    done = len(read_validation(config.output))
    left = [score for score in scores[done:] for _ in config.validation.modes]
    real = validation_sums

    def scored(*arguments: Any) -> dict[str, float]:
        return real(*arguments) | {"official": left.pop(0)}

    monkeypatch.setattr("train.loop.validation_sums", scored)
    stop = StopFlag(config.output)
    with stop.installed():
        code = run_training(config, scripted.shop_pool(folder), stop, scripted.ScriptedPolicy, held_out)
    return code, [line["step"] for line in read_validation(config.output)]


def test_best_is_kept_beside_the_last_and_says_what_it_was_selected_on(
    tmp_path: Path, model_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, steps = _run(tmp_path, model_folder, monkeypatch, [6, 4, 2, 3])
    assert (code, steps) == (0, [0, 2, 4, 5])
    run = tmp_path / "run"
    # Step 2 was no step to save at, and is beyond what retention keeps.
    assert [(step, problem) for step, _, problem in list_checkpoints(run)] == [(2, None), (5, None)]
    assert (run / "best").resolve() == checkpoint_folder(run, 2)
    note = json.loads((run / "best.json").read_text())
    assert (note["checkpoint"], note["score"]) == ("checkpoint-step-2", 4 / 6)
    assert note["selected_on"] == "official accuracy on a set (6 of 60 questions), schema withheld"
    assert [line["best"] for line in read_validation(run)] == [False, True, False, False]
    assert all(line["full"]["questions"] == line["withheld"]["questions"] == 6 for line in read_validation(run))
    assert_same_run(metrics(tmp_path), metrics(finished))


def test_a_better_one_takes_the_place_of_the_best(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(tmp_path, model_folder, monkeypatch, [0, 1, 1, 2], "steps=6", "planned_steps=5")[0] == 0
    run = tmp_path / "run"
    assert (run / "best").resolve() == checkpoint_folder(run, 6)
    assert [step for step, _, _ in list_checkpoints(run)] == [6]


def test_without_a_baseline_or_validation(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, steps = _run(tmp_path, model_folder, monkeypatch, [1, 1], "validation.at_start=false", "steps=2")
    assert steps == [2]
    config = scripted.make_config(tmp_path, model_folder, ["validation.benchmark=toy"])
    assert load_held_out(config, []) is None


def test_stopped_in_a_validation_it_is_done_after_the_resume(
    tmp_path: Path, model_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes in the validation after the last step: its step is saved, and not called finished."""
    config = scripted.make_config(tmp_path, model_folder)
    text = scripted.ScriptedPolicy._text

    def stopping(self: Any, request: Any) -> str:
        if request.context["example"].question_id == "h3" and len(metrics(tmp_path)) == 5:
            (config.output / STOP_FILE).touch()
        answer: str = text(self, request)
        return answer

    monkeypatch.setattr("train.stopping._LOOK_EVERY", 0.0)
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", stopping)
    more = "validation.at_start=false"
    assert _run(tmp_path, model_folder, monkeypatch, [1, 2, 3], more) == (EXIT_REQUEUE, [2, 4])
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", text)
    assert _run(tmp_path, model_folder, monkeypatch, [1, 2, 3], more) == (0, [2, 4, 5])
    assert (config.output / "best").resolve() == checkpoint_folder(config.output, 5)
    assert_same_run(metrics(tmp_path), metrics(finished))
    assert _run(tmp_path, model_folder, monkeypatch, [], more) == (0, [2, 4, 5])


def test_a_run_killed_before_its_best_was_published_mends_it(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.loop.publish_best", lambda *arguments: None)
    _run(tmp_path, model_folder, monkeypatch, [0, 5], "steps=2")
    assert not (tmp_path / "run" / "best").is_symlink()
    # As a killed run would leave it: a later line of a step whose checkpoint never came, and one cut short.
    with (tmp_path / "run" / VALIDATION).open("a") as file:
        file.write(json.dumps(read_validation(tmp_path / "run")[-1] | {"step": 4, "score": 1.0}) + '\n{"step": 5, "sc')
    monkeypatch.setattr("train.loop.publish_best", publish_best)
    code, steps = _run(tmp_path, model_folder, monkeypatch, [0, 0, 1, 1, 1, 1])
    assert (code, steps) == (0, [0, 2, 4, 5])
    assert (tmp_path / "run" / "best").resolve() == checkpoint_folder(tmp_path / "run", 2)


@pytest.fixture
def fake_checkpoint(tmp_path: Path) -> Callable[[int], Path]:
    def make(step: int) -> Path:
        folder = checkpoint_folder(tmp_path, step)
        folder.mkdir()
        (folder / "train_state.pt").write_text("x")
        (folder / MARKER).write_text(json.dumps({"files": {"train_state.pt": 1}}))
        return folder

    return make


def _write(folder: Path, *lines: tuple[int, float, str]) -> None:
    text = "".join(
        json.dumps({"step": step, "score": score, "key": key, "selected_on": "s"}) + "\n" for step, score, key in lines
    )
    (folder / VALIDATION).write_text(text)


def test_only_what_compares_and_is_complete_can_be_best(tmp_path: Path, fake_checkpoint: Callable[[int], Path]) -> None:
    for step in (10, 20, 30, 40):
        fake_checkpoint(step)
    _write(tmp_path, (0, 1.0, "k"), (10, 0.9, "old"), (20, 0.5, "k"), (30, 0.7, "k"), (40, 0.5, "k"))
    line = best_line(tmp_path)
    assert line is not None
    assert line["step"] == 30
    (checkpoint_folder(tmp_path, 30) / MARKER).unlink()
    line = best_line(tmp_path)
    assert line is not None
    assert line["step"] == 20, "the earlier of equal ones"


def test_retention_never_deletes_best_nor_the_only_complete_one(
    tmp_path: Path, fake_checkpoint: Callable[[int], Path]
) -> None:
    for step in (10, 20, 30):
        fake_checkpoint(step)
    assert apply_retention(tmp_path, 1, [10]) == [checkpoint_folder(tmp_path, 20)]
    (checkpoint_folder(tmp_path, 30) / "train_state.pt").unlink()
    assert apply_retention(tmp_path, 1) == []
    assert [step for step, _, problem in list_checkpoints(tmp_path) if problem is None] == [10]


def test_best_disappears_with_its_checkpoint(tmp_path: Path, fake_checkpoint: Callable[[int], Path]) -> None:
    fake_checkpoint(10)
    _write(tmp_path, (10, 0.5, "k"))
    publish_best(tmp_path, pytest.fail)
    assert (tmp_path / "best" / MARKER).is_file()
    (checkpoint_folder(tmp_path, 10) / MARKER).unlink()
    publish_best(tmp_path, pytest.fail)
    assert not (tmp_path / "best").is_symlink()
    assert not (tmp_path / "best.json").exists()


def test_where_links_are_refused_the_note_names_the_folder(
    tmp_path: Path, fake_checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_checkpoint(10)
    _write(tmp_path, (10, 0.5, "k"))

    def refused(*arguments: Any, **more: Any) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    said: list[str] = []
    publish_best(tmp_path, said.append)
    assert "checkpoint-step-10" in said[0]
    assert json.loads((tmp_path / "best.json").read_text())["checkpoint"] == "checkpoint-step-10"
