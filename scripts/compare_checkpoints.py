"""How far two models are apart: tensor by tensor, whatever their shards, dtypes and spellings of names.

    python scripts/compare_checkpoints.py runs/x/checkpoint-step-200 exports/x

A and B are model folders, exports, run folders (their newest complete checkpoint) or hub ids. `model.…` of a text
model and `model.language_model.…` of a full one are the same tensor. A tensor is `equal` bit for bit; `rounded` when
the two differ in dtype and the wider one cast to the narrower dtype is the other, as for a float32 checkpoint and its
bfloat16 export. Other files are compared by their bytes.

Exit code 0: all is equal. 1: something differs. 2: a folder can't be used.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

# Run as a file, Python puts this folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.cli import ArgumentParser, run_main
from shared.files import check_output, write_output
from train.export.compare import Comparison, Status, TensorPair, compare_folders, relative
from train.export.names import Kind
from train.export.sources import checkpoint_folder, model_folder
from train.export.write import json_bytes


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    if args.json is not None:
        check_output(args.json, "--json")
    a, b = (checkpoint_folder(model_folder(name, flag)) for name, flag in ((args.a, "A"), (args.b, "B")))
    console.print(f"A: {a}\nB: {b}", soft_wrap=True)
    with Progress(console=console, transient=True) as bars:
        task = bars.add_task("comparing", total=None)
        found = compare_folders(a, b, lambda done, total: bars.update(task, completed=done, total=total))
    _print(console, found, args.top)
    equal = found.same_weights() and (args.weights_only or found.same_files())
    if args.json is not None:
        write_output(args.json, json_bytes(as_json(a, b, found)), "--json")
    console.print("equal" if equal else "different")
    return 0 if equal else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", help="folder or hub id; changes are measured against it")
    parser.add_argument("b", metavar="B", help="folder or hub id")
    parser.add_argument("--top", type=int, default=10, help="how many of the most changed tensors to list (default 10)")
    parser.add_argument("--weights-only", action="store_true", help="other files don't count for the exit code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found here")
    return parser.parse_args(argv)


def by_kind(pairs: Sequence[TensorPair]) -> dict[Kind, list[TensorPair]]:
    """The tensors of each kind that there is, in the order in which kinds are listed."""
    groups = {kind: [pair for pair in pairs if pair.kind == kind] for kind in get_args(Kind)}
    return {kind: group for kind, group in groups.items() if group}


def totals(pairs: Sequence[TensorPair]) -> dict[str, Any]:
    """Counts by status, the largest change of a value, and the relative L2 difference of all values together."""
    measured = [pair for pair in pairs if pair.squares is not None]
    sums = [sum(pair.squares[i] for pair in measured if pair.squares is not None) for i in (0, 1)]
    return {
        "tensors": len(pairs),
        "status": {status: sum(pair.status == status for pair in pairs) for status in get_args(Status)},
        "max_change": max((pair.max_change for pair in measured if pair.max_change is not None), default=None),
        "relative_l2": relative(*sums) if measured else None,
    }


def most_changed(pairs: Sequence[TensorPair], n: int) -> list[TensorPair]:
    """The n tensors that differ most by relative L2; those that can't be subtracted first, equal ones never."""
    apart = [pair for pair in pairs if pair.status in ("rounded", "different", "other shape")]
    return sorted(apart, key=lambda pair: (pair.relative_l2 is not None, -(pair.relative_l2 or 0.0)))[:n]


def as_json(a: Path, b: Path, found: Comparison) -> dict[str, Any]:
    """What --json writes."""
    rows = [
        {
            "name": pair.name,
            "kind": pair.kind,
            "status": pair.status,
            "shapes": pair.shapes,
            "dtypes": pair.dtypes,
            "max_change": pair.max_change,
            "relative_l2": pair.relative_l2,
        }
        for pair in found.tensors
    ]
    return {
        "a": str(a),
        "b": str(b),
        "same_weights": found.same_weights(),
        "same_files": found.same_files(),
        "all": totals(found.tensors),
        "kinds": {kind: totals(group) for kind, group in by_kind(found.tensors).items()},
        "files": dict(found.files),
        "tensors": rows,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _print(console: Console, found: Comparison, top: int) -> None:
    statuses = [status for status in get_args(Status) if any(pair.status == status for pair in found.tensors)]
    table = Table("kind", "tensors", *statuses, "max |a-b|", "relative L2")
    for kind, group in [*by_kind(found.tensors).items(), ("all", found.tensors)]:
        if kind == "all":
            table.add_section()
        sums = totals(group)
        counts = [str(sums["status"][status] or "") for status in statuses]
        table.add_row(kind, str(len(group)), *counts, _number(sums["max_change"]), _number(sums["relative_l2"]))
    console.print(table)
    if changed := most_changed(found.tensors, top):
        table = Table("most changed", "A", "B", "max |a-b|", "relative L2")
        table.columns[0].overflow = "fold"
        for pair in changed:
            sides = [f"{d} {list(s or ())}" for d, s in zip(pair.dtypes, pair.shapes, strict=True)]
            table.add_row(pair.name, *sides, _number(pair.max_change), _number(pair.relative_l2))
        console.print(table)
    for status in ("only in A", "only in B"):
        if names := [pair.name for pair in found.tensors if pair.status == status]:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            console.print(f"{status}: {', '.join(names[:5])}{more}", soft_wrap=True)
    for status in ("different", "only in A", "only in B"):
        if names := [name for name, found_status in found.files.items() if found_status == status]:
            console.print(f"files {status}: {', '.join(names)}", soft_wrap=True)


if __name__ == "__main__":
    run_main(main)
