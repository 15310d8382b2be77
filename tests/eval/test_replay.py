import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import replay
from eval.config import EvalConfig
from eval.records import EPISODES, RUN, SUMMARY, read_episodes, read_json, to_line, write_json
from eval.replay import Difference, differences, main
from shared.errors import SetupError
from tests.eval.agents import evaluate_mixed
from tests.eval.hostile import write_hostile
from tests.eval.runs import arguments

Edit = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with questions, databases, and the run of an agent that fails in every way."""
    folder = write_hostile(tmp_path_factory.mktemp("hostile"))
    with pytest.MonkeyPatch.context() as patch:
        evaluate_mixed(patch, arguments(folder, folder / "run", "--mode", "full"), "a")
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be tampered with."""
    return Path(shutil.copytree(made / "run", tmp_path / "run"))


def edit_episodes(run: Path, edit: Edit) -> None:
    records = read_episodes(run / EPISODES)
    edit(records)
    (run / EPISODES).write_text("".join(map(to_line, records)))


def outcome(run: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([str(run), "--json", *argv])
    return code, json.loads(capsys.readouterr().out)


def test_a_replay_of_an_untouched_run_finds_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "40 episodes" in said
    assert "No difference" in said
    assert "note:" not in said
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_every_ending_is_among_what_is_replayed(run: Path) -> None:
    records = read_episodes(run / EPISODES)
    assert {record["origin"] for record in records} >= {"submitted", "final_text", "none"}
    assert {call["outcome"] for r in records for t in r["turns"] for call in t["calls"]} >= {
        "ok",
        "bad_call",
        "refused",
        "sql_error",
        "submitted",
    }


def _first(records: list[dict[str, Any]], tool: str) -> dict[str, Any]:
    call: dict[str, Any] = next(c for r in records for t in r["turns"] for c in t["calls"] if c["tool"] == tool)
    return call


def _set(place: Callable[[list[dict[str, Any]]], dict[str, Any]], key: str, value: Any) -> Edit:
    def edit(records: list[dict[str, Any]]) -> None:
        assert place(records)[key] != value
        place(records)[key] = value

    return edit


TAMPERED: dict[str, tuple[Edit, str]] = {
    "a result's text": (_set(lambda r: _first(r, "sample_rows"), "text", "other"), "turns[2].calls["),
    "a call's outcome": (_set(lambda r: _first(r, "list_tables"), "outcome", "sql_error"), "turns[1].calls[1].outcome"),
    "a call's arguments": (
        _set(lambda r: _first(r, "describe_table"), "args", {"table_name": "x"}),
        ".args.table_name",
    ),
    "an answer": (_set(lambda r: r[-1], "answer_sql", "SELECT 7"), "answer_sql"),
    "an ending": (_set(lambda r: r[-1], "ended", "elsewhere"), "ended"),
    "an origin": (_set(lambda r: r[-1], "origin", "fallback"), "origin"),
    "a verdict": (_set(lambda r: r[-1]["scores"]["official"], "score", 0.5), "scores.official.score"),
    "a gold": (_set(lambda r: r[-1]["gold"], "rows", 99), "gold.rows"),
    "the rows of an answer": (_set(lambda r: r[-1], "results", None), "results"),
    "a turn's text": (
        lambda r: r[-1]["turns"][0].update(
            text='<think>\nx\n</think>\n\n{"tool": "foreign_keys", "args": {"table_name": "item"}}'
        ),
        "turns[1].calls[1]",
    ),
    "a dropped turn": (lambda r: r[-1]["turns"].pop(), "ended"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_whatever_was_tampered_with_is_named(run: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    edit, where = TAMPERED[name]
    edit_episodes(run, edit)
    code, said = outcome(run, capsys)
    assert code == 1
    assert any(where in difference["where"] for difference in said["differences"]), said["differences"]


def test_a_summary_that_does_not_follow_from_the_episodes_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = read_json(run / SUMMARY)
    write_json(run / SUMMARY, summary | {"official": 0.99})
    code, said = outcome(run, capsys)
    assert code == 1
    assert [(d["question_id"], d["where"], d["recorded"]) for d in said["differences"]] == [
        ("summary.json", "official", "0.99")
    ]


def test_a_changed_database_shows(made: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    databases = Path(shutil.copytree(made / "databases", tmp_path / "databases"))
    connection = sqlite3.connect(databases / "plain" / "plain.sqlite")
    connection.execute("INSERT INTO item VALUES (4, 'dog')")
    connection.commit()
    connection.close()
    code, said = outcome(run, capsys, "--databases", str(databases))
    assert code == 1
    assert {"database_sha256", "gold.rows"} & {d["where"] for d in said["differences"]}
    assert any("data_sha256 differs" in note for note in said["notes"])
    assert not any(d["question_id"] == "q<0>" for d in said["differences"])


def test_data_that_moved_is_found_with_options(
    made: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(made, tmp_path / "moved"))
    about = read_json(run / RUN)
    about["source"] |= {"questions": str(tmp_path / "gone.json"), "databases": str(tmp_path / "gone")}
    write_json(run / RUN, about)
    with pytest.raises(SetupError, match="/gone does not exist"):
        main([str(run)])
    code, said = outcome(
        run, capsys, "--questions", str(moved / "questions.json"), "--databases", str(moved / "databases")
    )
    assert (code, said["differences"]) == (0, [])


def test_questions_that_are_gone_are_a_mistake(made: Path, run: Path, tmp_path: Path) -> None:
    questions = json.loads((made / "questions.json").read_text())
    (tmp_path / "fewer.json").write_text(json.dumps(questions[1:]))
    with pytest.raises(SetupError, match="are not in the data"):
        main([str(run), "--questions", str(tmp_path / "fewer.json")])


def test_an_episode_that_ran_out_of_tokens_ends_where_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cut(records: list[dict[str, Any]]) -> None:
        record = next(r for r in records if r["origin"] == "submitted" and len(r["turns"]) == 4)
        record["turns"] = record["turns"][:2]
        record["turns"][1]["stop_reason"] = "length"
        record |= {"ended": "token_limit", "origin": "none", "answer_sql": None, "results": None, "truncated": True}

    edit_episodes(run, cut)
    _, said = outcome(run, capsys)
    wheres = {d["where"] for d in said["differences"] if d["question_id"] != "summary.json"}
    # Only its verdict, which was that of the answer it no longer has.
    assert wheres
    assert not {where for where in wheres if where.startswith(("turns", "ended", "origin", "answer_sql"))}


def test_a_fault_of_the_harness_is_replayed_as_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(records: list[dict[str, Any]]) -> None:
        record = records[-1]
        record["turns"] = record["turns"][:1]
        record |= {"ended": "error", "error": "Traceback\nValueError: x", "origin": "none", "answer_sql": None}
        record |= {"status": "harness_error", "reason": "ValueError: x", "scores": None, "results": None}
        record["answer_set_sha256"] = None

    edit_episodes(run, fail)
    _, said = outcome(run, capsys)
    assert [d for d in said["differences"] if d["question_id"] != "summary.json"] == []


def test_a_run_without_its_source_is_refused(run: Path) -> None:
    about = read_json(run / RUN)
    del about["source"]
    write_json(run / RUN, about)
    with pytest.raises(SetupError, match="older version"):
        main([str(run)])


def test_budgets_of_another_version_are_refused(run: Path) -> None:
    about = read_json(run / RUN)
    about["identity"]["budgets"]["max_luck"] = 7
    write_json(run / RUN, about)
    with pytest.raises(SetupError, match="max_luck"):
        main([str(run)])


def test_another_version_is_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = read_json(run / SUMMARY)
    summary["identity"]["versions"]["sqlite"] = "3.0.0"
    summary["identity"]["prompt_sha256"] = "0" * 64
    write_json(run / SUMMARY, summary)
    _, said = outcome(run, capsys)
    assert any("sqlite 3.0.0" in note for note in said["notes"])
    assert any("system prompt" in note for note in said["notes"])


def test_differences_that_the_clock_can_make_are_told_apart() -> None:
    def difference(old: str, new: str) -> Difference:
        return Difference("q", 0, "x", old, new)

    assert difference("timeout", "ok").by_the_clock
    assert difference("answer: timeout: 30 s", "same set of rows").by_the_clock
    assert not difference("ok", "sql_error").by_the_clock


def test_records_are_compared_as_json() -> None:
    record = {"question_id": "q", "sample": 0, "turns": [], "a": (1, 2), "seed": 1}
    assert differences(record, record | {"a": [1, 2], "seed": 2}) == []
    assert [d.where for d in differences(record, record | {"a": [1, 3]})] == ["a[2]"]
    assert [d.where for d in differences(record, record | {"new": 1})] == ["new"]


def test_hostile_text_stays_text_on_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_episodes(run, _set(lambda r: _first(r, "list_tables"), "text", "[bold]\x1b[31mred[/bold]"))
    assert main([str(run)]) == 1
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[bold]" in said


def test_settings_come_from_the_run(made: Path) -> None:
    about = read_json(made / "run" / RUN)
    config = replay.run_settings(about, {"workers": 1}, made / "run")
    assert isinstance(config, EvalConfig)
    assert (config.mode, config.workers, config.questions) == ("full", 1, made / "questions.json")
