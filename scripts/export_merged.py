"""Turn a training checkpoint into the folder that `vllm serve` loads, and prove it.

    python scripts/export_merged.py --checkpoint runs/x/checkpoint-600 --base Qwen/Qwen3.5-2B --out exports/x

The trained language-model tensors go under the base's names and into the base's dtypes (or, with --dtype-from
checkpoint, keep their own); the vision tower, the MTP
head, the configuration, the tokenizer and the chat template are the base's own, byte for byte, and
generation_config.json stops on both stop tokens. Everything is checked before anything is written; the folder is
written beside its place and renamed, and by default read back and compared tensor by tensor before that.
OUT/export_report.json says where every tensor came from.

Base and checkpoint are folders or hub ids. A checkpoint is a whole model or a plain LoRA adapter of peft, which is
merged in float32. Not covered: quantized weights, other adapters, FSDP shards (`accelerate merge-weights` joins them).
Exit code 2: something given can't be used, nothing was written. 1: the written export failed its check and was removed.
"""

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

# Run as a file, Python puts this folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shared.cli import ArgumentParser, run_main
from shared.files import write_atomic
from shared.tools.protocol import PROMPT_SHA256
from train.export.aux_files import plan_aux_files
from train.export.card import CARD, max_tokens, render_card
from train.export.one_file import one_file
from train.export.plan import ExportPlan, check_output_folder, make_plan
from train.export.record import CardRecord, card_record
from train.export.sources import checkpoint_folder, model_folder
from train.export.thinking import thinking, thinking_note
from train.export.verify import TensorRow, Verdict, provenance, verify_export
from train.export.write import beside, write_export, write_json

REPORT = "export_report.json"
AGENT = "agent.py"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    base = model_folder(args.base, "--base")
    checkpoint = checkpoint_folder(model_folder(args.checkpoint, "--checkpoint"))
    check_output_folder(args.out, base, checkpoint)
    aux_files = plan_aux_files(base, checkpoint) | {AGENT: agent_program()}
    console.print(f"checking every tensor of {checkpoint} against {base}", soft_wrap=True)
    note = thinking_note(thinking(base))
    plan = make_plan(base, checkpoint, args.dtype_from)
    plan = replace(plan, warnings=(*plan.warnings, *([note] if note else [])))
    record = card_record(args.out.resolve().name, base, checkpoint, lambda line: console.print(f"note: {line}"))

    try:
        rows = _export(plan, aux_files, args.out, console, record, verify=args.verify)
    except VerificationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print_summary(console, plan, rows, args.out, verified=args.verify)
    console.print(f"serve it: vllm serve {args.out} --max-model-len {max_tokens(record)}", soft_wrap=True)
    return 0


def agent_program() -> bytes:
    """agent.py: asks the exported model a question over a database, and needs nothing of this project."""
    return one_file("eval.agent", {"system prompt": f"sha256 {PROMPT_SHA256}"}).encode()


class VerificationError(Exception):
    """The export that was written is not what it should be: the disk's fault or ours, never the user's."""

    def __init__(self, problems: Sequence[str]) -> None:
        listed = "; ".join(problems[:5])
        super().__init__(f"the written export is wrong and was removed: {listed} ({len(problems)} problems)")


def _export(
    plan: ExportPlan, aux_files: Mapping[str, bytes], out: Path, console: Console, record: CardRecord, *, verify: bool
) -> Sequence[TensorRow]:
    """Write, verify and put in place. Returns the provenance table; raises VerificationError."""
    size = plan.tensor_bytes
    with beside(out, size + sum(map(len, aux_files.values()))) as folder:
        with Progress(console=console, transient=True) as bars:
            task = bars.add_task("writing", total=size)
            write_export(plan, aux_files, folder, lambda n: bars.advance(task, n))
            verdict = Verdict(provenance(plan), ())
            if verify:
                task = bars.add_task("verifying", total=size)
                verdict = verify_export(plan, aux_files, folder, lambda n: bars.advance(task, n))
        if verdict.problems:
            raise VerificationError(verdict.problems)
        files = {name: hashlib.sha256(content).hexdigest() for name, content in aux_files.items()}
        others = {
            "files": files,
            "rewritable": [CARD],
            "thinking": thinking(folder),
            "card": record.model_dump(mode="json"),
        }
        written = report(plan, verdict.rows, verified=verify) | others
        write_json(folder / REPORT, written)
        write_atomic(folder / CARD, render_card(record, written, folder))
    return verdict.rows


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, help="checkpoint or LoRA adapter folder, run folder (its newest) or hub id"
    )
    parser.add_argument(
        "--base", required=True, help="folder or hub id of the base model that the run was started from"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to make; absent or empty")
    parser.add_argument(
        "--dtype-from",
        choices=("base", "checkpoint"),
        default="base",
        help="whose dtype each trained tensor gets (default: base)",
    )
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read the export back and compare it tensor by tensor (default: on)",
    )
    return parser.parse_args(argv)


def report(plan: ExportPlan, rows: Sequence[TensorRow], *, verified: bool) -> dict[str, object]:
    """What export_report.json holds: totals by origin, warnings, and one row a tensor."""
    return {
        "base": str(plan.base.folder),
        "checkpoint": str(plan.checkpoint),
        "dtype_from": plan.dtype_from,
        "verified": verified,
        "tensors": len(rows),
        "parameters": sum(row.numel for row in rows),
        "tensor_bytes": sum(row.nbytes for row in rows),
        "changed": sum(bool(row.changed) for row in rows) if verified else None,
        "origins": {origin: _totals(group) for origin, group in _by_origin(rows).items()},
        "warnings": list(plan.warnings),
        "table": [asdict(row) for row in rows],
    }


def _by_origin(rows: Sequence[TensorRow]) -> dict[str, list[TensorRow]]:
    groups: dict[str, list[TensorRow]] = defaultdict(list)
    for row in rows:
        groups[row.origin].append(row)
    return dict(groups)


def _totals(rows: Sequence[TensorRow]) -> dict[str, object]:
    measured = [row for row in rows if row.changed is not None]
    return {
        "tensors": len(rows),
        "parameters": sum(row.numel for row in rows),
        "bytes": sum(row.nbytes for row in rows),
        "dtypes": {dtype: sum(row.dtype == dtype for row in rows) for dtype in sorted({row.dtype for row in rows})},
        "changed": sum(bool(row.changed) for row in measured) if measured else None,
        "max_change": max((row.max_change or 0.0 for row in measured), default=None),
    }


def _print_summary(console: Console, plan: ExportPlan, rows: Sequence[TensorRow], out: Path, *, verified: bool) -> None:
    table = Table("from", "tensors", "parameters", "dtypes", "changed", "by at most")
    table.columns[2].no_wrap = True
    for origin, group in _by_origin(rows).items():
        totals = _totals(group)
        dtypes = ", ".join(f"{dtype} {count}" for dtype, count in totals["dtypes"].items())  # type: ignore[attr-defined]
        changed, largest = ("", "") if not verified else (str(totals["changed"]), f"{totals['max_change']:.3g}")
        table.add_row(origin, str(len(group)), f"{totals['parameters']:,}", dtypes, changed, largest)
    table.add_section()
    table.add_row("all", str(len(rows)), f"{sum(row.numel for row in rows):,}", "", "", "")
    console.print(table)
    for warning in plan.warnings:
        console.print(f"note: {warning}", soft_wrap=True)
    if verified and not any(row.changed for row in rows):
        console.print(
            "note: no tensor differs from the base; is this the checkpoint of a trained model?", soft_wrap=True
        )
    console.print(f"{'verified' if verified else 'written, not verified'}: {out}", soft_wrap=True)


if __name__ == "__main__":
    run_main(main)
