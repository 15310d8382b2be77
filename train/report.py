"""A run's curves in one file.

    python -m train.report runs/grpo_curriculum [--out report.html]

An HTML file has everything inside; with `.svg` or `.png` it is one picture. Works on a run in progress.
"""

import base64
import html
import io
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.cli import ArgumentParser, run_main
from shared.config import load_yaml
from shared.errors import SetupError
from shared.files import check_output, write_output
from train.curriculum import CurriculumSettings, progress
from train.log import METRICS, format_seconds
from train.selection import best_line, read_validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, Any]]

TIERS = {"equivalent": "#2a7f62", "executable": "#e0b13c", "parsable": "#d9743a", "invalid": "#a33b3b"}
_COLOURS = ("#2456a6", "#c2571a", "#2a7f62", "#7b4ba0")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The finished steps of a run, by ascending step. SetupError when there is none."""
    try:
        text = (run / METRICS).read_text(encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{run} has no {METRICS}: give the folder of a training run") from error
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # the last line of a run in progress
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            lines.append(value)
    if not lines:
        raise SetupError(f"{run / METRICS} has no finished step yet: come back later")
    return sorted(lines, key=lambda line: int(line["step"]))


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values up to each; NaN (a figure that a step lacks) is left out.

    >>> trailing_mean([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    means = []
    for end in range(1, len(values) + 1):
        part = [value for value in values[max(end - window, 0) : end] if not math.isnan(value)]
        means.append(sum(part) / len(part) if part else math.nan)
    return means


def column(lines: Lines, name: str) -> list[float]:
    """One figure over the steps, NaN where a step has none (an empty step has no KL)."""
    values = [line.get(name) for line in lines]
    return [float(value) if isinstance(value, (int, float)) else math.nan for value in values]


def formula_quantile(step: int, settings: CurriculumSettings) -> float:
    """Mean quantile that the curriculum's weights give when all quantiles are equally frequent.

    With a = k (2p - 1): the mean of q under a density ∝ exp(a (2q - 1)) on [0, 1] is 1/2 + (coth a - 1/a) / 2.

    >>> round(formula_quantile(0, CurriculumSettings(k=2.0)), 4)
    0.2313
    """
    a = settings.k * (2.0 * progress(step, settings) - 1.0) if settings.enabled else 0.0
    if abs(a) < 1e-4:
        return 0.5 + a / 6.0
    return 0.5 + (1.0 / math.tanh(a) - 1.0 / a) / 2.0


class Curves:
    """What the panels draw: the steps (counted from 1), their figures, the validations and the run's config."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.lines = read_metrics(run)
        self.steps = [int(line["step"]) + 1 for line in self.lines]
        self.window = max(len(self.lines) // 40, 1)
        self.validations = read_validation(run)
        self.best = best_line(run)
        path = run / "config.yaml"
        self.config: dict[str, Any] = load_yaml(path) if path.is_file() else {}

    def curve(self, axes: "Axes", name: str, colour: str, label: str) -> None:
        """Each step faintly, and the trailing mean over a fortieth of the run."""
        values = column(self.lines, name)
        if self.window > 1:
            axes.plot(self.steps, values, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(self.steps, trailing_mean(values, self.window), color=colour, label=label, marker=_dot(self.steps))

    def setting(self, *keys: str) -> Any:
        """A value of the run's config, None where it has none."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def _dot(steps: Sequence[int]) -> str:
    """A line through one point is invisible."""
    return "." if len(steps) < 3 else ""


def _outcomes(axes: "Axes", curves: Curves) -> None:
    shares = [trailing_mean(column(curves.lines, f"tier_{tier}"), curves.window) for tier in TIERS]
    axes.stackplot(curves.steps, shares, labels=list(TIERS), colors=list(TIERS.values()))
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of the episodes")


def _reward(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "reward", _COLOURS[0], "mean reward")
    curves.curve(axes, "f1", _COLOURS[1], "row F1")
    axes.set_ylim(bottom=0)


def _effort(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "turns", _COLOURS[0], "rounds")
    curves.curve(axes, "calls", _COLOURS[1], "tool calls")
    axes.set_ylabel("an episode")
    axes.set_ylim(bottom=0)


def _curriculum(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "quantile", _COLOURS[0], "drawn")
    settings = CurriculumSettings(
        bool(curves.setting("curriculum", "enabled")),
        int(curves.setting("curriculum", "ramp_steps") or 400),
        float(curves.setting("curriculum", "k") or 0.0),
    )
    # The pool's own expectation where the run logged it: ties and the pool's end make it differ a little.
    expected = [
        line.get("quantile_expected", formula_quantile(step - 1, settings))
        for line, step in zip(curves.lines, curves.steps, strict=True)
    ]
    axes.plot(curves.steps, expected, color="black", linestyle="--", label="formula")
    axes.set_ylim(0, 1)
    axes.set_ylabel("mean quantile of gold length")


def _kl(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "kl", _COLOURS[0], "KL (k3 a token)")
    curves.curve(axes, "kl_coefficient", _COLOURS[1], "coefficient")
    target = curves.setting("loss", "kl", "target")
    if curves.setting("loss", "kl", "mode") == "adaptive" and target is not None:
        axes.axhline(float(target), color="black", linestyle="--", label="target")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(bottom=0)


def _sampler(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "gap_mean", _COLOURS[0], "mean |trainer - sampler|")
    limit = curves.setting("gate", "mean_gap")
    if limit is not None:
        axes.axhline(float(limit), color="black", linestyle="--", label="limit of the gate")
    axes.set_yscale("log")
    axes.set_ylabel("log-prob of a sampled token")


def _gradient(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "grad_norm", _COLOURS[0], "gradient norm before clipping")
    axes.set_ylim(bottom=0)


def _length(axes: "Axes", curves: Curves) -> None:
    curves.curve(axes, "tokens", _COLOURS[0], "tokens")
    curves.curve(axes, "sampled_tokens", _COLOURS[1], "of these sampled")
    axes.set_ylabel("an episode")
    axes.set_ylim(bottom=0)


def _time(axes: "Axes", curves: Curves) -> None:
    phases = ("sync", "rollout", "score", "update")
    spent = [column(curves.lines, f"seconds_{phase}") for phase in phases]
    # A run of before the sync was measured by itself has it within the rollouts.
    seconds = [trailing_mean([0.0 if math.isnan(s) else s for s in values], curves.window) for values in spent]
    axes.stackplot(curves.steps, seconds, labels=phases, colors=_COLOURS)
    axes.set_ylabel("seconds a step")


def _validation(axes: "Axes", curves: Curves) -> None:
    modes = [mode for mode in ("withheld", "full") if mode in curves.validations[-1]]
    for mode, colour in zip(modes, _COLOURS, strict=False):
        at = [line for line in curves.validations if mode in line]
        axes.plot([v["step"] for v in at], [v[mode]["official"] for v in at], color=colour, marker="o", label=mode)
    if curves.best is not None:
        axes.axvline(curves.best["step"], color="black", linestyle="--", label="best")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("official accuracy")


PANELS: Mapping[str, Callable[["Axes", Curves], None]] = {
    "Outcomes": _outcomes,
    "Reward": _reward,
    "Rounds and calls": _effort,
    "Curriculum": _curriculum,
    "KL to the start": _kl,
    "Trainer against sampler": _sampler,
    "Gradient": _gradient,
    "Length": _length,
    "Time": _time,
    "Held-out accuracy": _validation,
}


def panels(curves: Curves) -> list[str]:
    """The titles of the panels that this run has figures for."""
    return [title for title in PANELS if title != "Held-out accuracy" or curves.validations]


def draw(axes: "Axes", title: str, curves: Curves) -> None:
    """Draw one panel."""
    PANELS[title](axes, curves)
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.legend(fontsize="x-small", framealpha=0.85, edgecolor="none")


def figure_of(titles: Sequence[str], curves: Curves) -> "Figure":
    """A figure with one panel, or a grid of two columns."""
    from matplotlib.figure import Figure

    columns = min(len(titles), 2)
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
    for index, title in enumerate(titles):
        draw(figure.add_subplot(rows, columns, index + 1), title, curves)
    return figure


def picture(figure: "Figure", kind: str) -> bytes:
    """The figure as SVG or PNG, the same bytes for the same figures."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "execplan", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=120)
    return file.getvalue()


def summary(curves: Curves) -> list[tuple[str, str]]:
    """What a reader wants to know first: name and value."""
    last = curves.lines[-curves.window :]

    def tail(name: str) -> float:
        values = [value for value in column(last, name) if not math.isnan(value)]
        return sum(values) / len(values) if values else math.nan

    of = "step" if curves.window == 1 else f"{curves.window} steps"
    rows = [
        ("steps", f"{curves.steps[-1]:,} of {int(curves.setting('steps') or curves.steps[-1]):,}"),
        ("time", format_seconds(sum(value for value in column(curves.lines, "seconds") if not math.isnan(value)))),
        ("start", str(curves.setting("model", "path") or "unknown")),
        (
            f"exact, last {of}",
            f"{100 * tail('exact'):.1f}% of the episodes, {tail('turns'):.1f} rounds, {tail('calls'):.1f} calls",
        ),
        ("steps without a signal", str(sum(bool(line.get("empty")) for line in curves.lines))),
        ("episodes lost by faults of ours", f"{sum(e for e in column(curves.lines, 'errors') if e == e):.0f}"),
    ]
    if curves.best is not None:
        rows.append(("best", f"step {curves.best['step']}: {100 * curves.best['score']:.1f}%"))
        rows.append(("best was selected by", f"{curves.best['selected_on']}; too high an estimate of its accuracy"))
    return rows


_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1f24 }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem }
img { width: 100%; border: 1px solid #d8dee4; border-radius: 6px }
th { text-align: left; font-weight: 600; padding-right: 1.5rem; vertical-align: top }
pre { background: #f6f8fa; padding: 1rem; border-radius: 6px; overflow-x: auto }
"""


def page(curves: Curves) -> str:
    """The report as one HTML file; pictures are inside it."""
    name = html.escape(curves.run.resolve().name)
    rows = "\n".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in summary(curves))
    images = []
    for title in panels(curves):
        data = base64.b64encode(picture(figure_of([title], curves), "svg")).decode()
        images.append(f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">')
    path = curves.run / "config.yaml"
    config = html.escape(path.read_text(encoding="utf-8")) if path.is_file() else "no config.yaml in the run's folder"
    lines = f"Lines are means over the last {curves.window} steps, faint ones single steps."
    if curves.window == 1:
        lines = "Lines are single steps."
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{name}</h1>\n<table>{rows}</table>\n"
        f"<p>{lines}</p>\n"
        f"<main>{''.join(images)}</main>\n"
        f"<details><summary>config</summary><pre>{config}</pre></details></body></html>\n"
    )


def main(argv: list[str] | None = None) -> int:
    """Write the report of a run."""
    parser = ArgumentParser(prog="python -m train.report", description=main.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a training run")
    parser.add_argument("--out", type=Path, help="an .html, .svg or .png file; default RUN/report.html")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out or arguments.run / "report.html"
    if out.suffix not in (".html", ".svg", ".png"):
        raise SetupError(f"--out {out}: give a file that ends in .html, .svg or .png")
    check_output(out, "--out")
    curves = Curves(arguments.run)
    if out.suffix == ".html":
        content = page(curves).encode()
    else:
        content = picture(figure_of(panels(curves), curves), out.suffix[1:])
    write_output(out, content, "--out")
    print(out)
    if any((arguments.run / "episodes").glob("*.jsonl")):
        print(f"the sampled episodes, turn by turn: python -m eval.report {shlex.quote(str(arguments.run))}")
    return 0


if __name__ == "__main__":
    run_main(main)
