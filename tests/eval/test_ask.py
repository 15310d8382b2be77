import io
import json
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from eval.ask import main, parse_arguments
from eval.terminal import show_question, show_rows, show_turn
from shared.engines.scripted import call_text
from shared.errors import SetupError
from shared.sql.sandbox import BadText, QueryResult
from shared.text import plain
from tests.eval.agents import HOSTILE

LOOK, TRY, SUBMIT = (
    call_text("What is there?", "list_tables"),
    call_text("Does it run?", "run_query", sql="SELECT name FROM item"),
    call_text("Done.", "submit_sql", sql="SELECT name FROM item WHERE id > 1"),
)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("db") / "shop.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE item (id INTEGER, name TEXT)")
    connection.executemany("INSERT INTO item VALUES (?, ?)", [(1, "ant"), (2, "bee"), (3, None), (4, HOSTILE)])
    connection.commit()
    connection.close()
    return path


def canned(db: Path, *turns: str) -> list[str]:
    return ["--db", str(db), "--engine", "canned", *(word for turn in turns for word in ("--turn", turn))]


def test_an_episode_is_shown_from_question_to_rows(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = db.read_bytes()
    assert main([*canned(db, LOOK, TRY, SUBMIT), "Which items?", "--evidence", "items have names"]) == 0
    said = capsys.readouterr().out
    order = [
        "Which items?",
        "items have names",
        "turn 1",
        "What is there?",
        "list_tables()",
        "item",
        "5 tool turns left",
    ]
    order += [
        "turn 2",
        "run_query",
        "SELECT name FROM item",
        "4 tool turns left",
        "turn 3",
        "answer (submitted)",
        "bee",
        "3 rows",
    ]
    place = 0
    for words in order:
        place = said.find(words, place)
        assert place >= 0, f"{words!r} is not where it belongs in:\n{said}"
    assert db.read_bytes() == before


def test_nothing_hostile_reaches_the_terminal(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submit = f"<think>\n{HOSTILE}\n</think>\n\n" + json.dumps(
        {"tool": "submit_sql", "args": {"sql": "SELECT name FROM item"}}
    )
    assert main([*canned(db, TRY, f"{HOSTILE} [bold]no call[/bold]", submit), HOSTILE]) == 0
    said = capsys.readouterr().out
    for character in ("\x1b", "\u202e", "\u2028"):
        assert character not in said
    assert "␛" in said
    assert "<U+202E>" in said
    assert "[bold]no call[/bold]" in said


def test_an_episode_without_an_answer(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*canned(db, "<think>\nI do not know."), "What?", "--max-turns", "1"]) == 1
    said = capsys.readouterr().out
    assert "exploration limit" in said
    assert "closing turn" in said
    assert "no answer" in said


def test_an_answer_that_fails(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*canned(db, call_text("", "submit_sql", sql="SELECT nope FROM item")), "What?"]) == 1
    assert "no such column: nope" in capsys.readouterr().out


def test_gold_is_held_against_the_answer(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold = ["--gold", "SELECT name FROM item WHERE id > 1 ORDER BY id DESC"]
    assert main([*canned(db, SUBMIT), *gold, "Which?"]) == 0
    said = capsys.readouterr().out
    assert "✓ the same set of rows as gold" in said
    assert "✗ the same list of rows as gold" in said
    assert main(["--db", str(db), "--engine", "gold", *gold, "Which?"]) == 0
    assert "✓ the same list of rows as gold" in capsys.readouterr().out
    with pytest.raises(SetupError, match="--gold fails"):
        main([*canned(db, SUBMIT), "--gold", "SELECT x", "Which?"])


def test_a_long_result_is_cut_and_says_so(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*canned(db, call_text("", "submit_sql", sql="SELECT id FROM item")), "Which?", "--rows", "2"]) == 0
    assert "the first 2 rows; there are more" in capsys.readouterr().out


def test_json_is_one_record(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*canned(db, LOOK, SUBMIT), "Which?", "--json", "--mode", "full"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["origin"], record["mode"], len(record["turns"])) == ("submitted", "full", 2)


def test_questions_from_the_terminal(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("First?\nSecond?\n\nnever asked\n"))
    assert main(canned(db, SUBMIT)) == 0
    said = capsys.readouterr().out
    assert said.count("answer (submitted)") == 2
    assert "Second?" in said
    assert "never asked" not in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--db", "{db}.gone", "--engine", "canned", "--turn", "x", "Q"], "does not exist"),
        (["--db", "{text}", "--engine", "canned", "--turn", "x", "Q"], "text.sqlite"),
        (["--db", "{db}", "Q"], "no model"),
        (["--db", "{db}", "--engine", "gold", "Q"], "--gold"),
        (["--db", "{db}", "--engine", "canned", "Q"], "says nothing"),
        (["--db", "{db}", "--engine", "canned", "--turn", "x", "Q", "--rows", "0"], "at least 1 row"),
        (["--db", "{db}", "--engine", "canned", "--turn", "x", "Q", "--temperature", "-1"], "temperature"),
        (["--db", "{db}", "--model", "no/such/folder/here", "Q"], "no/such/folder/here"),
        (["Q"], "--db"),
    ],
)
def test_mistakes_are_one_line(db: Path, tmp_path: Path, argv: list[str], message: str) -> None:
    (tmp_path / "text.sqlite").write_text("this is no database, whatever its name is. " * 50)
    with pytest.raises(SetupError, match=message) as error:
        main([word.format(db=db, text=tmp_path / "text.sqlite") for word in argv])
    assert "\n" not in str(error.value)


def test_arguments_have_the_defaults_of_an_evaluation() -> None:
    ask = parse_arguments(["--db", "x.sqlite", "Q", "--model", "m"])
    assert (ask.config.mode, ask.config.engine, ask.config.max_turns, ask.config.temperature) == (
        "withheld",
        "hf",
        6,
        0.6,
    )


# ---- the terminal


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tab\tand\nline", "tab\tand\nline"),
        ("\x1b]0;title\x07\x00\x7f\x9b", "␛]0;title␇␀<U+007F><U+009B>"),
        ("\u202e\u2066\u200b\ufeff\u2028", "<U+202E><U+2066><U+200B><U+FEFF><U+2028>"),
        ("\ud800", "?"),
        ("naïve 日本 🙂", "naïve 日本 🙂"),
        ("\r overwritten", "␍ overwritten"),
    ],
)
def test_plain_text(text: str, shown: str) -> None:
    assert plain(text) == shown


def recorded(width: int = 60) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False, force_terminal=False)


def shown_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_cells_are_shown_for_what_they_are() -> None:
    console = recorded()
    rows = [(None, b"\x00\xff", 1.5, "a\nb", BadText(b"M\xfc"), "[red]x[/red]"), ("x" * 500, "", 0, "", "", "")]
    show_rows(console, QueryResult("ok", tuple("abcdef"), rows))
    said = shown_on(console)
    for words in ("NULL", "x'00ff'", "a␊b", "M\ufffd", "[red]x"):
        assert words in said
    assert "x" * 100 not in said.replace("\n", "")


def test_a_long_thought_is_cut_in_lines() -> None:
    console = recorded()
    view = {
        "think": "\n".join(map(str, range(100))),
        "raw": None,
        "calls": [],
        "problem": None,
        "dropped": 3,
        "tokens": 5,
        "cut": True,
        "clean": False,
        "closing": False,
        "budget": None,
        "request": None,
    }
    show_turn(console, view, 2, 1.25)
    said = shown_on(console)
    assert "turn 2: 5 tokens, 1.2 s, not clean, cut by a token limit, 3 calls not run" in " ".join(said.split())
    assert "… 77 more lines" in said


def test_a_question_is_shown_whole() -> None:
    console = recorded(40)
    show_question(console, "word " * 50, "", "a.sqlite")
    assert shown_on(console).count("word") == 50
