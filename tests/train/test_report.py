"""The report of a run: whole, self-contained, and right about what it shows."""

import base64
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from shared.errors import SetupError
from train.curriculum import CurriculumSettings, expected_quantile, quantile_ranks
from train.report import Curves, column, figure_of, formula_quantile, main, panels, read_metrics, trailing_mean


class _Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, str] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.images[values["alt"] or ""] = values["src"] or ""
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_a_page_with_everything_inside(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "r.html"
    assert main([str(finished / "run"), "--out", str(out)]) == 0
    tags = _Tags()
    tags.feed(out.read_text())
    assert list(tags.images) == panels(Curves(finished / "run"))
    assert all(link.startswith("data:image/svg+xml;base64,") for link in tags.links)
    svg = base64.b64decode(tags.images["Curriculum"].partition(",")[2]).decode()
    for text in ("formula", "drawn", "mean quantile of gold length"):
        assert text in svg
    assert "5 of 5" in out.read_text()
    assert "Lines are single steps." in out.read_text()
    before = out.read_bytes()
    main([str(finished / "run"), "--out", str(out)])
    assert out.read_bytes() == before


@pytest.mark.parametrize(("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_one_picture(finished: Path, tmp_path: Path, suffix: str, magic: bytes) -> None:
    out = tmp_path / f"r.{suffix}"
    assert main([str(finished / "run"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(magic)


def test_the_curves_are_the_run_s_figures(finished: Path) -> None:
    curves = Curves(finished / "run")
    (axes,) = figure_of(["Curriculum"], curves).axes
    drawn, formula = axes.get_lines()
    assert list(np.asarray(drawn.get_ydata())) == column(curves.lines, "quantile")
    assert list(np.asarray(formula.get_ydata())) == column(curves.lines, "quantile_expected")
    (outcomes,) = figure_of(["Outcomes"], curves).axes
    assert [text.get_text() for text in outcomes.get_legend().get_texts()] == [  # type: ignore[union-attr]
        "equivalent",
        "executable",
        "parsable",
        "invalid",
    ]


@pytest.mark.parametrize("step", [0, 100, 200, 300, 400, 900])
def test_the_formula_is_the_pool_s_expectation(step: int) -> None:
    settings = CurriculumSettings()
    quantiles = quantile_ranks(list(range(20_001)))
    assert formula_quantile(step, settings) == pytest.approx(expected_quantile(quantiles, step, settings), abs=1e-4)
    assert formula_quantile(step, CurriculumSettings(enabled=False)) == 0.5


def test_a_run_with_validations_says_what_best_was_selected_on(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("metrics.jsonl", "config.yaml"):
        (run / name).write_text((finished / "run" / name).read_text())
    (run / "checkpoint-step-4").symlink_to(finished / "run" / "checkpoint-step-4")
    selected = "official accuracy on BIRD <dev> (256 of 1,534 questions), schema withheld"
    line = {"step": 4, "score": 0.5, "key": "k", "selected_on": selected}
    modes = {mode: {"official": 0.5} for mode in ("withheld", "full")}
    (run / "validation.jsonl").write_text(json.dumps(line | modes) + "\n")
    main([str(run)])
    text = (run / "report.html").read_text()
    assert "Held-out accuracy" in text
    assert "step 4: 50.0%" in text
    assert "BIRD &lt;dev&gt; (256 of 1,534 questions)" in text


def test_a_run_in_progress_and_empty_steps(finished: Path, tmp_path: Path) -> None:
    lines = (finished / "run" / "metrics.jsonl").read_text().splitlines()
    first = {name: value for name, value in json.loads(lines[0]).items() if name not in ("kl", "gap_mean", "grad_norm")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(first | {"empty": 1.0}) + "\n" + lines[1][:40])
    assert len(read_metrics(tmp_path)) == 1
    assert math.isnan(column(read_metrics(tmp_path), "kl")[0])
    assert main([str(tmp_path)]) == 0
    assert re.search(r"steps without a signal</th><td>1<", (tmp_path / "report.html").read_text())


def test_it_says_how_to_read_the_episodes(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(finished / "run"), "--out", str(tmp_path / "r.html")]) == 0
    assert f"python -m eval.report {finished / 'run'}" in capsys.readouterr().out


def test_a_mean_leaves_out_what_is_missing() -> None:
    assert trailing_mean([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]


def test_what_cannot_be_reported_is_said(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"has no metrics\.jsonl"):
        main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SetupError, match="no finished step yet"):
        main([str(tmp_path)])
    with pytest.raises(SetupError, match=r"\.html, \.svg or \.png"):
        main([str(finished / "run"), "--out", "r.pdf"])
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="is a file, not a folder"):
        main([str(finished / "run"), "--out", str(tmp_path / "file" / "r.html")])
