"""The pool heeds the audit of golds, which the evaluation writes, and weighs difficulties as the config says."""

import json
import sqlite3
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from eval.audit import AUDIT
from eval.audit import main as audit_main
from eval.gold import RULES
from shared.config import load_config
from shared.data.example import Example
from shared.database import Database
from shared.errors import SetupError
from train.config import CurriculumConfig, DataConfig, GoldFlag, TrainConfig
from train.pool import Pool, build_pool, check_draws, load_pool
from train.rollout import StepDraw

GOLDS = {
    "plain": "SELECT name FROM item WHERE price > 1 ORDER BY id",
    "tie": "SELECT name FROM item ORDER BY price LIMIT 1",
    "clock": "SELECT datetime('now')",
    "error": "SELECT missing FROM item",
    "empty": "SELECT name FROM item WHERE id > 100",
    "count": "SELECT count(*) FROM item",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """questions.json over databases/shop, and audit/audit.json as the evaluation writes it."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "databases" / "shop").mkdir(parents=True)
    connection = sqlite3.connect(folder / "databases" / "shop" / "shop.sqlite")
    connection.executescript(
        "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);"
        "INSERT INTO item VALUES (1, 'ant', 2), (2, 'bee', 2), (3, 'cow', 5);"
    )
    connection.close()
    write(folder / "questions.json", GOLDS)
    code = audit_main([*where(folder), "--no-cache", "--workers", "1", "--out", str(folder / "audit")])
    assert code == 1, "a gold fails"
    return folder


def where(folder: Path, questions: str = "questions.json") -> list[str]:
    return ["--questions", str(folder / questions), "--databases", str(folder / "databases")]


def write(path: Path, golds: dict[str, str]) -> None:
    questions = [
        {"question_id": key, "db_id": "shop", "question": f"{key}?", "query": sql, "difficulty": "Simple"}
        for key, sql in golds.items()
    ]
    path.write_text(json.dumps(questions))


def load(folder: Path, audit: Path | None, questions: str = "questions.json", **more: Any) -> tuple[set[str], str]:
    """The ids in the pool, and what was said."""
    said: list[str] = []
    config = DataConfig(
        benchmark="questions", questions=folder / questions, databases=folder / "databases", audit=audit, **more
    )
    pool = load_pool(config, folder / "run", 0, said.append)
    return {example.question_id for example in pool.examples}, "\n".join(said)


def test_flagged_golds_leave_the_pool_and_are_counted(folder: Path) -> None:
    ids, said = load(folder, folder / "audit" / AUDIT)
    assert ids == {"plain", "empty", "count"}
    assert "gold audit: 3 of 6 questions left out (1 gold_error, 1 gold_clock, 1 gold_tie)" in said
    assert load(folder, None)[0] == set(GOLDS)


def test_what_leaves_is_a_key_of_the_config(folder: Path) -> None:
    ids, said = load(folder, folder / "audit" / AUDIT, audit_drop=("gold_empty", "gold_tie"))
    assert ids == {"plain", "clock", "error", "count"}
    assert "2 of 6 questions left out (1 gold_empty, 1 gold_tie)" in said
    assert load(folder, folder / "audit" / AUDIT, audit_drop=())[0] == set(GOLDS)
    with pytest.raises(ValidationError, match="audit_drop"):
        DataConfig(benchmark="toy", audit_drop=("gold_ties",))  # type: ignore[arg-type]


def test_the_flags_are_those_of_the_audit() -> None:
    assert set(get_args(GoldFlag)) == {*RULES, "slow", "ties_unchecked"}
    failing = {rule.key for rule in RULES.values() if rule.fails}
    assert set(DataConfig(benchmark="toy").audit_drop) == failing | {"gold_tie", "gold_clock"}


def test_slow_golds_and_unchecked_ties_can_leave_too(folder: Path, tmp_path: Path) -> None:
    audit = json.loads((folder / "audit" / AUDIT).read_text())
    by_id = {entry["question_id"]: entry for entry in audit["golds"]}
    by_id["plain"]["slow"] = True
    by_id["count"]["ties_checked"] = False
    (tmp_path / AUDIT).write_text(json.dumps(audit))
    ids, said = load(folder, tmp_path / AUDIT, audit_drop=("slow", "ties_unchecked"))
    assert ids == set(GOLDS) - {"plain", "count"}
    assert "(1 slow, 1 ties_unchecked)" in said


def test_the_limit_comes_before_the_audit_and_unknown_questions_are_counted(folder: Path) -> None:
    ids, _ = load(folder, folder / "audit" / AUDIT, limit=2)
    assert ids == {"plain"}
    write(folder / "more.json", {**GOLDS, "new": "SELECT 1"})
    ids, said = load(folder, folder / "audit" / AUDIT, "more.json")
    assert "new" in ids
    assert "1 of the others are not in" in said


def test_an_audit_of_other_questions_is_refused(folder: Path, tmp_path: Path) -> None:
    remedy = "audit the training questions themselves: python -m eval.audit --questions .*questions.json --databases"
    audit = json.loads((folder / "audit" / AUDIT).read_text())

    def with_golds(change: Any) -> Path:
        entries = [{**entry, **change(i, entry)} for i, entry in enumerate(audit["golds"])]
        (tmp_path / AUDIT).write_text(json.dumps({**audit, "golds": entries}))
        return tmp_path / AUDIT

    foreign = with_golds(lambda i, entry: {"question_id": f"bird_{i}"})
    with pytest.raises(SetupError, match=rf"{AUDIT} knows none of the pool's questions; {remedy}"):
        load(folder, foreign)
    one = with_golds(lambda i, entry: {"question_id": "stranger"} if i == 0 else {})
    with pytest.raises(
        SetupError, match=rf"has 1 questions that the pool does not know \(stranger for one\); {remedy}"
    ):
        load(folder, one)
    moved = with_golds(lambda i, entry: {"db_id": "other"})
    with pytest.raises(SetupError, match=rf"plain on database other, the pool has it on shop; {remedy}"):
        load(folder, moved)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"golds": 3}', '{"golds": [{}]}', '{"golds": [[]]}', "\udcff"])
def test_a_file_that_is_no_audit_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(
        SetupError, match=r"a\.json is no audit of golds; give the audit\.json of python -m eval\.audit"
    ):
        load(folder, tmp_path / "a.json")
    with pytest.raises(SetupError, match=r"b\.json cannot be read \(No such file"):
        load(folder, tmp_path / "b.json")


def test_an_audit_that_leaves_nothing_is_named(folder: Path) -> None:
    write(folder / "tie.json", {"tie": GOLDS["tie"]})
    audit_main([*where(folder, "tie.json"), "--no-cache", "--workers", "1", "--out", str(folder / "one")])
    with pytest.raises(SetupError, match=r"the training pool is empty.*data\.audit"):
        load(folder, folder / "one" / AUDIT, "tie.json")


# ---- the difficulty mix


def leveled(levels: dict[str, int]) -> Pool:
    """A pool with so many questions of each difficulty."""
    database = Database("d", path=Path("d.sqlite"))
    names = [name for name, count in levels.items() for _ in range(count)]
    return build_pool([Example(f"q{i:03}", "d", "?", "SELECT 1", database, difficulty=n) for i, n in enumerate(names)])


def test_factors_go_by_difficulty_whatever_its_case() -> None:
    pool = leveled({"Simple": 2, "HARD": 1, "": 1})
    assert pool.factors({}) is None
    factors = pool.factors({"simple": 0.25, "Hard": 3})
    assert factors is not None
    assert factors.tolist() == [0.25, 0.25, 3.0, 1.0]


def test_a_mix_the_pool_cannot_follow_is_refused() -> None:
    pool = leveled({"simple": 4, "hard": 2})
    with pytest.raises(SetupError, match=r"curriculum\.mix: no question is 'moderate'; the pool has hard, simple"):
        check_draws(pool, {"moderate": 1}, 1)
    with pytest.raises(SetupError, match=r"6 questions, of which curriculum\.mix leaves 2, a step draws 3"):
        check_draws(pool, {"simple": 0}, 3)
    with pytest.raises(SetupError, match="the pool has 6 questions, a step draws 7"):
        check_draws(pool, {}, 7)
    with pytest.raises(SetupError, match="carry no difficulty"):
        check_draws(leveled({"": 3}), {"simple": 1}, 1)


@pytest.mark.parametrize("factor", [-0.5, float("nan"), float("inf"), 1e7, 1e-7])
def test_factors_are_finite_and_not_negative(factor: float) -> None:
    with pytest.raises(ValidationError, match="mix"):
        CurriculumConfig(mix={"simple": factor})
    with pytest.raises(ValidationError, match="twice"):
        CurriculumConfig(mix={"simple": 1, "Simple": 2})


def test_a_step_never_asks_a_difficulty_of_weight_zero() -> None:
    """Also not where it looks further down the draw for questions whose gold can be used."""
    pool = leveled({"simple": 10, "hard": 10})
    text = {"output": Path("run"), "model": {"path": "m"}, "data": {"benchmark": "toy"}, "rollout": {"questions": 6}}

    class AllUsable:
        def gold(self, example: Example) -> None:
            return None

    config = TrainConfig.model_validate({**text, "curriculum": {"mix": {"hard": 0}}})
    for step in range(20):
        questions = StepDraw(pool, step, config, AllUsable()).take(100)  # type: ignore[arg-type]
        assert len(questions) == 10
        assert {question.example.difficulty for question in questions} == {"simple"}


def test_the_mix_is_read_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "output: run\nmodel: {path: m}\ndata: {benchmark: toy}\ncurriculum: {mix: {simple: 1, hard: 0.5}}\n"
    )
    assert load_config(path, TrainConfig).curriculum.mix == {"simple": 1.0, "hard": 0.5}
    assert load_config(path, TrainConfig, ["curriculum.mix.hard=2"]).curriculum.mix == {"simple": 1.0, "hard": 2.0}
    with pytest.raises(SetupError, match=r"curriculum\.mix"):
        load_config(path, TrainConfig, ["curriculum.mix.hard=-1"])
