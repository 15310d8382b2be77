import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.content import Content, comparison_content, run_content
from eval.page import embed_json, render_page
from eval.pairing import load_run
from eval.plots import Estimate, bar_plot, histogram_plot, interval_plot
from eval.records import SUMMARY, read_json, write_json
from eval.report import load_content, main, render_markdown
from eval.tables import Row, Table, points, to_markdown
from eval.trace import trace
from shared.errors import SetupError
from shared.text import escape_markdown
from tests.eval.agents import HOSTILE, evaluate_mixed
from tests.eval.hostile import DB_ID, write_hostile
from tests.eval.runs import arguments


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the agent that fails in every way, over hostile data."""
    folder = write_hostile(tmp_path_factory.mktemp("hostile"))
    with pytest.MonkeyPatch.context() as patch:
        for salt in "ab":
            evaluate_mixed(patch, arguments(folder, folder / salt), salt)
    return folder / "a", folder / "b"


@pytest.fixture(scope="module")
def content(runs: tuple[Path, Path]) -> Content:
    return load_content(runs[:1])


@pytest.fixture(scope="module")
def page(content: Content) -> str:
    return "".join(render_page(content))


class Reader(HTMLParser):
    """Collects elements, attributes, and the text of every script."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: dict[str, str] = {}
        self.tags: list[str] = []
        self._script: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "script":
            self._script = dict(attrs).get("id") or ""
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


# ---- the page


def test_nothing_outside_the_page_is_named(page: str) -> None:
    for tag, name, value in read(page).attributes:
        if name in ("src", "href", "xlink:href", "action", "srcset", "data", "poster"):
            assert value.startswith(("#", "data:,")), (tag, name, value)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_no_element_carries_code(page: str) -> None:
    assert [a for a in read(page).attributes if a[1].startswith("on")] == []


def test_only_our_elements_are_there(page: str) -> None:
    # Everything hostile is text: no element of it came into being.
    assert not {"img", "b", "i", "iframe", "object", "embed", "base"} & set(read(page).tags)


def test_the_policy_allows_this_script_alone(page: str) -> None:
    reader = read(page)
    policy = next(value for tag, name, value in reader.attributes if tag == "meta" and "default-src" in value)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[""].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]


def test_episodes_come_back_out_of_the_page_whole(page: str, content: Content) -> None:
    scripts = read(page).scripts
    index = json.loads(scripts["index"])
    assert [entry["id"] for entry in index] == [records[0]["question_id"] for records in content.episodes]
    for i, (record,) in enumerate(content.episodes):
        assert index[i]["question"] == record["question"]
        (side,) = json.loads(scripts[f"t{i}"])
        for shown, turn in zip(side["turns"], record["turns"], strict=True):
            assert [call["text"] for call in shown["calls"]] == [call["text"] for call in turn["calls"]]


def test_every_fate_of_an_episode_is_in_the_data(content: Content) -> None:
    """The agent is meant to fail in every way; were it not to, the other tests here would test little."""
    tiers = {json.loads(embed_json(records[0]["scores"]))["pred_outcome"] for records in content.episodes}
    assert {"ok", "no_answer", "sql_error", "refused"} <= tiers
    assert {records[0]["origin"] for records in content.episodes} >= {"submitted", "final_text", "none"}


@pytest.mark.parametrize("value", [HOSTILE, "<!--<script>", "\ud800", {"</script>": ["&lt;", "\u2029"]}, "]]>", "\x00"])
def test_embedded_json_is_inert_and_the_same_value(value: Any) -> None:
    text = embed_json(value)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_the_same_run_gives_the_same_page(content: Content, page: str) -> None:
    assert "".join(render_page(content)) == page


# ---- what a trace shows beside the record


def turn(text: str, **changes: Any) -> dict[str, Any]:
    base = {"text": text, "n_tokens": 3, "stop_reason": "stop", "clean": True, "problem": None, "dropped": 0}
    return base | {"closing": False, "calls": []} | changes


def turns_of(*turns: dict[str, Any], max_turns: int = 6) -> list[dict[str, Any]]:
    record = {"scores": None, "reason": "", "error": None, "results": None, "turns": list(turns)}
    shown: list[dict[str, Any]] = trace(record, max_turns)["turns"]
    return shown


def query(sql: str, outcome: str = "ok") -> dict[str, Any]:
    return {"tool": "run_query", "args": {"sql": sql}, "outcome": outcome, "text": "a\n1"}


def test_the_environment_speaks_between_the_turns() -> None:
    silent = turn("<think>\nhm\n</think>\n\nno idea", clean=False, problem="no_call")
    asked = turn("SELECT 1", closing=True)
    shown = turns_of(silent, turn("…", calls=[query("SELECT 2"), query("SELECT x", "sql_error")]), asked, max_turns=2)
    assert "no tool call found" in shown[0]["problem"]
    assert shown[0]["budget"] == "[1 tool turn left before you must answer]"
    assert shown[0]["raw"] == silent["text"]
    assert shown[1]["raw"] is None
    assert "exploration limit" in shown[1]["request"]
    assert "SELECT 2" in shown[1]["request"]
    assert shown[2]["budget"] is None
    assert shown[2]["request"] is None
    assert shown[2]["raw"] == "SELECT 1"


def test_failed_queries_are_why_the_closing_turn_comes_early() -> None:
    failing = turn("…", calls=[query("SELECT x", "sql_error")] * 4)
    assert "Too many queries failed" in turns_of(failing, turn("", closing=True))[0]["request"]


def test_the_problem_on_record_is_shown_not_the_parsers() -> None:
    text = 'Hm. {"tool": "list_tables"}'
    assert "more than the JSON call" in turns_of(turn(text, clean=False, problem="unclean"), turn(""))[0]["problem"]


# ---- plots


def test_plots_take_their_colours_from_the_page_and_hold_no_hostile_markup() -> None:
    rows = [
        Estimate(HOSTILE, 0.5, 0.4, 0.6, 10),
        Estimate("$\\frac{", 0.1, 0.0, 0.3, 5),
        Estimate("日本 🙂", 1.0, 0.9, 1.0, 3),
    ]
    plots = [
        interval_plot("T <i>", "", rows, xlabel="x"),
        interval_plot("T", "", rows, xlabel="x", difference=True),
        bar_plot("B", "", [("</svg><script>", 3, "strict"), ("zero", 0, "wrong")], xlabel="n"),
        histogram_plot("H", "", [("<b>", [1, 2, 30_000], "strict"), ("none", [], "wrong")], xlabel="n"),
    ]
    for plot in plots:
        tags = set(read(plot.svg).tags)
        assert tags <= {"svg", "defs", "g", "path", "text", "use", "clippath", "rect"}
        assert "var(--" in plot.svg
        assert not re.search(r"#[0-9a-f]{6}\b", plot.svg)
        assert "font-family" not in plot.svg
        assert "http" not in plot.svg.replace("http://www.w3.org/1999/xlink", "")
    assert "$\\frac{" in plots[0].svg


def test_a_plot_of_nothing_is_still_a_plot() -> None:
    assert "<svg" in histogram_plot("H", "", [("right", [], "strict")], xlabel="n").svg


# ---- markdown


def test_markdown_cells_cannot_break_out() -> None:
    table = Table(
        "T", "", ("a", "b"), (Row(("x|y", "<b>\n| z")), Row(("[l](http://x)", "`q` *e* _u_ & \\"))), words=(1,)
    )
    lines = to_markdown(table).splitlines()
    assert len(lines) == 6
    for line in lines[2:]:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert "<b>" not in to_markdown(table).replace("\\<b\\>", "")
    assert escape_markdown("a\u2028b\nc") == "a b c"


def test_markdown_of_a_run(content: Content) -> None:
    text = render_markdown(content)
    assert text.startswith("## ")
    assert "| all questions | 40 |" in text
    assert "### How episodes ended" in text
    assert "<script" not in text.replace("\\<", "")


def test_points_have_a_sign() -> None:
    assert [points(x) for x in (0.028, -0.034, 0.0)] == ["+2.8", "−3.4", "+0.0"]


# ---- content


def test_the_figures_are_those_of_the_summary(runs: tuple[Path, Path], content: Content) -> None:
    summary = read_json(runs[0] / SUMMARY)
    scores = next(table for table in content.tables if table.title == "Scores")
    assert scores.rows[0].cells[2] == f"{100 * summary['official']:.1f}%"
    ended = next(table for table in content.tables if table.title == "How episodes ended")
    assert sum(int(row.cells[1]) for row in ended.rows) == summary["n"]
    assert {row.filters["db"] for t in content.tables if t.title == "By database" for row in t.rows if row.filters} == {
        DB_ID,
        "plain",
    }


def test_a_comparison_pairs_the_episodes(runs: tuple[Path, Path]) -> None:
    made = comparison_content(load_run(runs[0]), load_run(runs[1]))
    assert len(made.episodes) == 40
    assert all(a["question_id"] == b["question_id"] for a, b in made.episodes)
    assert made.runs == ("a", "b")
    transitions = next(table for table in made.tables if table.title == "What became of what")
    assert sum(int(cell) for row in transitions.rows for cell in row.cells[1:]) == 40
    page = read("".join(render_page(made)))
    assert len(json.loads(page.scripts["t0"])) == 2


def test_a_run_against_itself_differs_in_nothing(runs: tuple[Path, Path]) -> None:
    run = load_run(runs[0])
    made = comparison_content(run, run)
    assert "No question was answered differently" in made.sentence
    assert made.runs == ("A", "B")


def test_runs_with_unequal_samples_are_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        evaluate_mixed(patch, arguments(runs[0].parent, tmp_path / "three", "--vote", "3"), "c")
    three, one = load_run(tmp_path / "three"), load_run(runs[0])
    for a, b in ((three, one), (one, three)):
        made = comparison_content(a, b)
        assert len(made.episodes) == 40
        assert any(row.cells[0] == "samples" for row in made.tables[-1].rows)
    alone = run_content(three)
    assert [row.cells[0] for row in alone.tables[0].rows[:2]] == ["all questions", "vote of 3"]
    assert len(alone.episodes) == 120


def test_a_summary_of_an_older_version_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("run.json", "episodes.jsonl", SUMMARY):
        (tmp_path / name).write_bytes((runs[0] / name).read_bytes())
    summary = read_json(tmp_path / SUMMARY)
    del summary["measures"]
    write_json(tmp_path / SUMMARY, summary)
    with pytest.raises(SetupError, match="older version"):
        run_content(load_run(tmp_path))


# ---- command line


def call_main(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr("sys.argv", ["report", *argv])
    return main()


def test_command_writes_into_the_run_folder(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call_main(monkeypatch, str(runs[0]), "--markdown", str(tmp_path / "t.md")) == 0
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>")
    assert "40 episodes" in capsys.readouterr().out
    assert (tmp_path / "t.md").is_file()
    assert call_main(monkeypatch, str(runs[0]), str(runs[1])) == 0
    assert (runs[1] / "compare-a.html").is_file()
    assert not list(runs[0].glob(".*.tmp"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere"], "does not exist"),
        (["{a}", "{b}", "{a}"], "one run or of two"),
        (["{a}", "--out", "{a}/summary.json/x.html"], "--out .*summary.json is a file, not a folder"),
        (["{a}", "--markdown", "{a}/summary.json/x.md"], "--markdown .*summary.json is a file, not a folder"),
        (["{a}", "--out", "{a}"], "cannot be written"),
        ([], "required"),
    ],
)
def test_mistakes_are_one_line(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    with pytest.raises(SetupError, match=message) as error:
        call_main(monkeypatch, *(a.format(a=runs[0], b=runs[1]) for a in argv))
    assert "\n" not in str(error.value)
