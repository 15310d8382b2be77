"""The sampled episodes of a training run in the trace viewer: the trainer's own lines, hostile text, damaged files."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from eval.content import Content
from eval.page import render_page
from eval.plots import histogram_plot
from eval.report import load_content, main, render_markdown
from eval.training_lines import TIERS, read_step
from shared.errors import SetupError
from tests.eval.hostile import write_hostile
from tests.eval.training_runs import write_training_run

STEP_25 = "step-000025.jsonl"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = write_hostile(tmp_path_factory.mktemp("hostile"))
    return write_training_run(data, data / "run", steps=(0, 25, 50))


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "episodes" / STEP_25).read_text().splitlines()]


@pytest.fixture(scope="module")
def content(run: Path) -> Content:
    return load_content([run])


@pytest.fixture(scope="module")
def page(content: Content) -> str:
    return "".join(render_page(content))


class Reader(HTMLParser):
    """The tags, the attributes that could act, and the text of each script by id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.acting: list[tuple[str, str]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.acting += [
            (name, value or "")
            for name, value in attrs
            if name.startswith("on") or (name in ("src", "href") and not (value or "").startswith(("#", "data:,")))
        ]
        if tag == "script":
            self._script = dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        self._script = None if tag == "script" else self._script

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def test_every_episode_is_in_the_page_with_its_reward_and_tier(run: Path, lines: list[dict[str, Any]]) -> None:
    scripts = Reader("".join(render_page(load_content([run / "episodes" / STEP_25])))).scripts
    index = json.loads(scripts["index"])
    assert len(index) == len(lines) == 21
    for i, (entry, line) in enumerate(zip(index, lines, strict=True)):
        (side,), episode, score = entry["sides"], line["episode"], line["score"]
        assert entry["question"] == line["question"]
        assert (entry["step"], entry["group"]) == (25, f"step 25 · {episode['question_id']}")
        assert (side["outcome"], side["tier"]) == (score["tier"], TIERS[score["tier"]])
        assert (side["reward"], side["origin"], side["answer"]) == (
            score["reward"],
            episode["origin"],
            episode["answer_sql"],
        )
        assert side["mode"] == episode["mode"]
        (trace,) = json.loads(scripts[f"t{i}"])
        parts = {name: value for name, value, _ in trace["verdicts"]}
        assert parts["reward"] == pytest.approx(score["reward"], abs=1e-4)
        assert parts["reward"] == pytest.approx(sum(parts.values()) - parts["reward"], abs=1e-3)
        assert parts["exact"] == (3.0 if score["exact"] else 0.0)
        for shown, turn in zip(trace["turns"], episode["turns"], strict=True):
            assert [call["text"] for call in shown["calls"]] == [call["text"] for call in turn["calls"]]
    # The budget of the run's own config (4 turns) and not the default.
    budgets = [turn["budget"] for i in range(21) for turn in json.loads(scripts[f"t{i}"])[0]["turns"][:1]]
    assert "[3 tool turns left before you must answer]" in budgets


def test_the_agent_ends_in_every_tier(content: Content) -> None:
    """Were it not to, the other tests here would test little."""
    assert {record["training"]["tier"] for (record,) in content.episodes} == set(TIERS)
    assert len({record["origin"] for (record,) in content.episodes}) > 2


def test_hostile_text_stays_text(page: str) -> None:
    reader = Reader(page)
    assert not {"img", "b", "i", "iframe", "object", "embed", "base"} & reader.tags
    assert reader.acting == []
    assert set(reader.scripts) == {"settings", "index", "", *(f"t{i}" for i in range(63))}
    assert "document.title='owned'" not in reader.scripts[""]
    assert "\u202e" not in page
    assert "\x1b" not in page


def test_the_tables_count_by_step_and_by_group(content: Content, lines: list[dict[str, Any]]) -> None:
    by_step, by_group = content.tables
    assert [row.cells[0] for row in by_step.rows] == ["0", "25", "50"]
    cells = dict(zip(by_step.columns, by_step.rows[1].cells, strict=True))
    assert (cells["questions"], cells["episodes"]) == ("7", "21")
    right = sum(line["score"]["exact"] for line in lines)
    assert cells["equivalent"] == f"{100 * right / 21:.1f}%"
    assert cells["reward"] == f"{sum(line['score']['reward'] for line in lines) / 21:.3f}"
    assert by_step.rows[1].filters == {"step": "25"}
    assert len(by_group.rows) == 21
    first = lines[0]["episode"]["question_id"]
    row = next(row for row in by_group.rows if row.filters == {"group": f"step 25 · {first}"})
    counts = [sum(line["score"]["tier"] == tier for line in lines[:3]) for tier in TIERS]
    assert row.cells[1:6] == ("3", *(str(count) if count else "" for count in counts))


def test_a_run_shows_its_last_steps_and_says_so(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "last" not in load_content([run]).subtitle
    content = load_content([run], 2)
    assert content.subtitle == "training · step 25 to 50 · the last 2 of 3 sampled steps"
    assert len(content.episodes) == 42
    assert len(load_content([run / "episodes"], 1).episodes) == 21
    assert len(load_content([run], 0).episodes) == 63
    text = render_markdown(content)
    assert "Outcomes by step" in text
    assert "<script>" not in text


def test_the_command_writes_beside_the_other_reports(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, out in ((run, run / "episodes.html"), (run / "episodes" / STEP_25, run / "episodes/step-000025.html")):
        monkeypatch.setattr("sys.argv", ["report", str(path)])
        assert main() == 0
        assert out.read_text().startswith("<!doctype html>")
        assert str(out) in capsys.readouterr().out
    assert not (run / "report.html").exists(), "that is the curves' place"
    monkeypatch.setattr("sys.argv", ["report", str(run), "--steps", "-1"])
    with pytest.raises(SetupError, match="--steps -1"):
        main()
    monkeypatch.setattr("sys.argv", ["report", str(run), str(run)])
    with pytest.raises(SetupError, match="by themselves"):
        main()


def change(line: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with one value replaced, `path` being keys and positions."""
    copy: Any = json.loads(json.dumps(line))
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    target = copy
    for key in keys:
        target = target[key]
    target[last] = value
    return dict(copy)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("step", "25", "step: Input should be a valid integer"),
        ("score", 3.2, "score: "),
        ("score.tier", "exact", "score.tier: "),
        ("score.reward", float("nan"), "NaN"),
        ("score.reward", None, "score.reward: "),
        ("episode.turns", {}, "episode.turns: "),
        ("episode.turns.0.text", None, "episode.turns.0.text: "),
        ("episode.turns.0.calls", [{"tool": "run_query", "args": {}, "outcome": "ok", "text": ""}], "sql"),
        ("episode.answer_sql", 3, "episode.answer_sql: "),
    ],
)
def test_a_damaged_line_is_named(lines: list[dict[str, Any]], tmp_path: Path, path: str, value: Any, said: str) -> None:
    file = tmp_path / STEP_25
    file.write_text(json.dumps(lines[0]) + "\n" + json.dumps(change(lines[1], path, value)) + "\n")
    with pytest.raises(
        SetupError, match=rf"{STEP_25}:2 is no episode of a training run \(.*{re.escape(said)}"
    ) as error:
        read_step(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no episodes"),
        (b'{"step": 1, "qua', ":1 is no episode"),
        (b"[]\n", ":1 is no episode"),
        (b'{"question_id": "q1", "sample": 0, "turns": []}\n', ":1 is no episode"),
        (b"[" * 100_000, ":1 is no episode"),
        (b"\xff\xfe\n", "cannot be read"),
    ],
)
def test_a_foreign_file_is_refused_in_a_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "step-1.jsonl").write_bytes(content)
    for path in (tmp_path / "step-1.jsonl", tmp_path):
        with pytest.raises(SetupError, match=said) as error:
            load_content([path])
        assert "\n" not in str(error.value)


def test_a_run_without_samples_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    with pytest.raises(SetupError, match="has no sampled episodes yet"):
        load_content([tmp_path])
    with pytest.raises(SetupError, match="does not exist"):
        load_content([tmp_path / "step-3.jsonl"])


def test_text_without_a_utf8_form_and_no_config(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    line = change(change(lines[0], "question", "half \ud800"), "episode.question_id", "id \udcff")
    (tmp_path / STEP_25).write_text(json.dumps(line) + "\n")
    content = load_content([tmp_path])
    "".join(render_page(content)).encode()
    assert "no config.yaml" in content.identities[0]["config"]


@pytest.mark.parametrize("values", [[3.0] * 9, [0.0]])
def test_episodes_that_are_all_alike_have_one_tick(values: list[float]) -> None:
    svg = histogram_plot("Calls", "", [("right", values, "strict")], xlabel="tool calls").svg
    shown = re.findall(r">\s*([\d,]+)\s*</text>", svg[: svg.index("matplotlib.axis_2")])
    assert shown == [f"{values[0]:.0f}"]
