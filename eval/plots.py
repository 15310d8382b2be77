"""The plots of a report: matplotlib figures as inline SVG that takes its colours and its font from the page.

Figures are drawn in marker colours; `to_svg` turns these into CSS variables, so that one plot serves light and dark.
Text stays text (it scales, it can be selected and read aloud). The same data give the same bytes.
"""

import io
import itertools
import math
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Marker colour -> the CSS variable that takes its place. Odd values, so that matplotlib makes none of them by itself.
_COLOURS: Mapping[str, str] = {
    "ink": "#0a1b01",
    "muted": "#0a1b02",
    "line": "#0a1b03",
    "accent": "#0a1b04",
    "other": "#0a1b05",
    "strict": "#0a1b06",
    "official": "#0a1b07",
    "wrong": "#0a1b08",
    "fails": "#0a1b09",
    "none": "#0a1b0a",
}
_WIDTH = 4.6  # inches at 72 points: about the width of a phone, so that text is readable there too
_LABEL_CHARACTERS = 22
MAX_ROWS = 40  # of an interval plot; more are a table's business
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "axes.edgecolor": _COLOURS["line"],
    "axes.labelcolor": _COLOURS["muted"],
    "axes.linewidth": 0.8,
    "text.color": _COLOURS["ink"],
    "text.parse_math": False,
    "xtick.color": _COLOURS["line"],
    "xtick.labelcolor": _COLOURS["muted"],
    "ytick.color": _COLOURS["line"],
    "ytick.labelcolor": _COLOURS["ink"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Plot:
    """An inline SVG with its title and the sentence that says what is to be seen."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Estimate:
    """A labelled value with its interval, and how many questions are behind it."""

    label: str
    value: float
    low: float
    high: float
    n: int


@matplotlib.rc_context(_RC)
def interval_plot(title: str, caption: str, rows: Sequence[Estimate], *, xlabel: str, difference: bool = False) -> Plot:
    """A dot and its interval a row, top down. Rates in percent on 0 to 100; differences around a line at zero."""
    figure, axes = _figure(height=0.75 + 0.27 * len(rows))
    places = list(range(len(rows)))[::-1]
    for place, row in zip(places, rows, strict=True):
        axes.plot([100 * row.low, 100 * row.high], [place, place], color=_COLOURS["accent"], lw=1.8, alpha=0.55)
        axes.plot([100 * row.value], [place], "o", color=_COLOURS["accent"], ms=5.5)
    if difference:
        axes.axvline(0, color=_COLOURS["muted"], lw=1.0)
        reach = max([5.0, *(100 * max(abs(row.low), abs(row.high)) for row in rows)]) * 1.08
        axes.set_xlim(-reach, reach)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}".replace("-", "−") if x else "0"))
    else:
        axes.set_xlim(-2, 102)
    axes.set_yticks(places, [f"{_label(row.label)} ({row.n:,})" for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    _finish(axes, xlabel)
    return Plot(title, caption, to_svg(figure, title))


@matplotlib.rc_context(_RC)
def bar_plot(title: str, caption: str, bars: Sequence[tuple[str, int, str]], *, xlabel: str) -> Plot:
    """Horizontal bars of (label, count, name of a colour), top down, each with its count."""
    figure, axes = _figure(height=0.7 + 0.27 * len(bars))
    places = list(range(len(bars)))[::-1]
    axes.barh(places, [count for _, count, _ in bars], color=[_COLOURS[colour] for *_, colour in bars], height=0.66)
    most = max([1, *(count for _, count, _ in bars)])
    for place, (_, count, _) in zip(places, bars, strict=True):
        axes.text(count + most * 0.015, place, f"{count:,}", va="center", color=_COLOURS["muted"])
    axes.set_yticks(places, [_label(label) for label, *_ in bars])
    axes.set_xlim(0, most * 1.12)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _finish(axes, xlabel)
    return Plot(title, caption, to_svg(figure, title))


@matplotlib.rc_context(_RC)
def histogram_plot(
    title: str, caption: str, groups: Sequence[tuple[str, Sequence[float], str]], *, xlabel: str, stacked: bool = True
) -> Plot:
    """Episodes by a count, in whole-numbered bins; (label, values, name of a colour) a group.

    Stacked groups add up to all episodes; otherwise each group is an outline of its own, for two runs side by side.
    """
    values = [value for _, group, _ in groups for value in group]
    edges = _edges(values)
    figure, axes = _figure(height=2.3)
    data: list[Any] = [list(group) for _, group, _ in groups]
    colours, labels = [_COLOURS[c] for *_, c in groups], [label for label, *_ in groups]
    if stacked:
        axes.hist(data, bins=edges, stacked=True, color=colours, label=labels, rwidth=0.92)
    else:
        for group, colour, label in zip(data, colours, labels, strict=True):
            axes.hist([group], bins=edges, histtype="step", color=[colour], label=label, lw=1.8)
    axes.legend(frameon=False, fontsize=8.5, handlelength=1.1, labelcolor=_COLOURS["ink"])
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    # Of a single whole number, one tick: else the locator would look for a second one between whole numbers.
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.tick_params(axis="y", labelcolor=_COLOURS["muted"])
    axes.set_ylabel("episodes")
    _finish(axes, xlabel, grid="y")
    return Plot(title, caption, to_svg(figure, title))


def _edges(values: Sequence[float]) -> list[float]:
    """Bin edges between whole numbers, at most 24 bins of a round width."""
    low, high = (math.floor(min(values)), math.floor(max(values))) if values else (0, 0)
    widths = (step * 10**power for power in itertools.count() for step in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < 24)
    start = low // width * width
    return [start - 0.5 + width * i for i in range(math.floor((high - start) / width) + 2)]


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(axes: Axes, xlabel: str, grid: str = "x") -> None:
    axes.set_xlabel(xlabel)
    for side in ("top", "right", "left" if grid == "x" else "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
    axes.grid(axis="x" if grid == "x" else "y", color=_COLOURS["line"], lw=0.7)
    axes.set_axisbelow(True)


def _label(text: str) -> str:
    """A label on one line, short, without characters that an SVG can't hold."""
    text = "".join(c if unicodedata.category(c)[0] != "C" else "·" for c in " ".join(text.split()))
    return text if len(text) <= _LABEL_CHARACTERS else text[: _LABEL_CHARACTERS - 1] + "…"


@matplotlib.rc_context(_RC)
def to_svg(figure: Figure, title: str) -> str:
    """The figure as an `<svg>` element to be put into a page; `title` names it to screen readers and makes its ids."""
    out = io.StringIO()
    salt = re.sub(r"\W+", "-", title.lower()).strip("-")
    matplotlib.rcParams["svg.hashsalt"] = salt
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the measuring font lacks is still drawn by the page
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern in (r"<!--.*?-->\s*", r"<metadata>.*?</metadata>\s*", r"<style type=\"text/css\">.*?</style>\s*"):
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    for name, marker in _COLOURS.items():
        svg = svg.replace(marker, f"var(--{name})")
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)
    svg = re.sub(r"(\bid=\"|href=\"#|url\(#)", rf"\g<1>{salt}-", svg)
    head = re.match(r"<svg[^>]*viewBox=\"([^\"]*)\"[^>]*>", svg)
    assert head is not None
    label = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{label}">{svg[head.end() :]}'
