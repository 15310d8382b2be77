"""The demo's last page: what GRPO changed, whether the export answers as the checkpoint does, and where the time went.

    python scripts/demo_report.py runs/demo-seed0

Reads the run folders of eval.run, what eval.compare says of before and after, and phases.tsv, and writes
report.txt. Exit code 1, and no report, when the exported model answers any question differently from the checkpoint
it came from.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run as a file, Python puts this folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from eval.records import EPISODES, SUMMARY, episode_key, read_episodes, read_json
from shared.cli import run_main
from shared.errors import SetupError


def different_answers(a: Path, b: Path) -> list[str]:
    """Ids of the questions that two run folders answered differently: another SQL, or another way to it."""
    first, second = ({episode_key(r): r for r in read_episodes(run / EPISODES)} for run in (a, b))
    if first.keys() != second.keys():
        raise SetupError(f"{a} and {b} asked different questions; remove the demo's folder and start again")
    keys = ("answer_sql", "origin", "ids")
    return [key[0] for key in first if any(first[key].get(k) != second[key].get(k) for k in keys)]


def _gain(name: str, before: dict[str, Any], after: dict[str, Any], comparison: dict[str, Any]) -> tuple[str, ...]:
    low, high = comparison["ci"]
    return (
        name,
        f"{before['official']:.1%}",
        f"{after['official']:.1%}",
        f"{100 * comparison['delta']:+.1f} points",
        f"{100 * low:+.1f} to {100 * high:+.1f}",
        f"{comparison['p']:.4f}" if comparison["p"] >= 1e-4 else f"{comparison['p']:.1e}",
    )


def results_table(
    before: dict[str, Any], after: dict[str, Any], comparison: dict[str, Any], sampled: tuple[dict[str, Any], ...]
) -> Table:
    """Before, after and the paired difference; `sampled` has the same three of the runs at T 0.6."""
    table = Table(title="Execution accuracy on held-out questions over unseen databases", title_justify="left")
    for name in ("", "before GRPO", "after GRPO", "difference", "95% CI", "McNemar p"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_row(*_gain(f"official, greedy (n = {comparison['n']})", before, after, comparison))
    table.add_row(*_gain("official, sampled at T 0.6", *sampled))
    table.add_section()
    for name, key, form in (
        ("strict", "strict", "{:.1%}"),
        ("submitted", "submit_rate", "{:.1%}"),
        ("executes", "executes_rate", "{:.1%}"),
        ("tool turns", "mean_turns", "{:.2f}"),
        ("tool calls", "mean_calls", "{:.2f}"),
    ):
        table.add_row(name, form.format(before[key]), form.format(after[key]))
    for label in sorted(set(before["by_difficulty"]) & set(after["by_difficulty"])):
        old, new = before["by_difficulty"][label], after["by_difficulty"][label]
        gain = 100 * (new["official"] - old["official"])
        table.add_row(
            f"  {label} (n = {new['n']})", f"{old['official']:.1%}", f"{new['official']:.1%}", f"{gain:+.1f} points"
        )
    return table


def phases_table(run: Path) -> Table:
    """Seconds of each phase, as noted by demo.sh."""
    table = Table(title="Seconds", title_justify="left", show_header=False)
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    phases = [line.split("\t") for line in (run / "phases.tsv").read_text().splitlines()]
    for name, seconds in phases:
        table.add_row(name, seconds)
    table.add_section()
    table.add_row("all", str(sum(int(seconds) for _, seconds in phases)))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page and write it to report.txt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="the demo's folder")
    run: Path = parser.parse_args(argv).run
    before, after = (read_json(run / name / SUMMARY) for name in ("before", "after"))
    sampled = [read_json(run / f"{name}-sampled" / SUMMARY) for name in ("before", "after")]
    sampled.append(read_json(run / "compare-sampled.json"))
    different = different_answers(run / "after", run / "export-answers")

    console = Console(record=True, width=110, highlight=False)
    console.print(results_table(before, after, read_json(run / "compare.json"), tuple(sampled)))
    console.print(phases_table(run))
    if different:
        console.print(f"FAILED: the export answers {len(different)} questions differently, {different[0]} for one")
    else:
        console.print(
            f"The exported model gave the checkpoint's answers, token by token, on all {after['n']} questions."
        )
    ask = f"python -m eval.run --model {run}/export --questions my.json --databases my_dbs --out runs/my"
    console.print(
        f"\nWhat next (source .venv/bin/activate):\n"
        f"  what the model did      open {run}/episodes.html in a browser: every episode, before and after\n"
        f"  how training went       open {run}/training.html\n"
        f"  before against after    python -m eval.compare {run}/before {run}/after --by difficulty\n"
        f"  your own databases      {ask}",
        soft_wrap=True,
    )
    if different:
        return 1
    # demo.sh takes this file for the sign of a finished demo.
    (run / "report.txt").write_text(console.export_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_main(main)
