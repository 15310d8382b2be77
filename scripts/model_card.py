"""Write the model card of an export again, with what evaluations have measured.

    python scripts/model_card.py --export exports/x --eval runs/x-bird runs/x-sqale --baseline runs/base-bird

README.md in the export is replaced; nothing else there is touched. Training figures come from the export's own report,
or from the run's folder with --run (where the report has none, or the run has gone on). Runs given with --eval must be
of this export's weights, which are hashed for that; a run of another model, or under another prompt, is refused.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Run as a file, Python puts this folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.card import results_markdown
from eval.models import model_sha256
from eval.pairing import load_run
from shared.cli import ArgumentParser, run_main
from shared.config import build_config
from shared.errors import SetupError
from shared.files import write_atomic
from train.export.aux_files import read_json
from train.export.card import CARD, render_card
from train.export.record import CardRecord, Training, read_training

REPORT = "export_report.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, metavar="DIR", help="folder that export_merged.py wrote")
    parser.add_argument("--run", type=Path, metavar="DIR", help="folder of the training run (default: as on record)")
    parser.add_argument("--eval", type=Path, nargs="+", default=[], metavar="RUN", help="finished runs of eval.run")
    parser.add_argument("--baseline", type=Path, nargs="+", default=[], metavar="RUN", help="runs of other models")
    arguments = parser.parse_args(argv)
    if arguments.baseline and not arguments.eval:
        raise SetupError("--baseline is compared with runs of this export: give them with --eval")
    folder: Path = arguments.export
    report = read_json(folder / REPORT)
    record = card_record_of(folder, report)
    if arguments.run is not None:
        training = training_of(arguments.run, str(report["checkpoint"]), record.training)
        record = record.model_copy(update={"training": training})
    results = ""
    if arguments.eval:
        runs, baselines = ([load_run(run) for run in given] for given in (arguments.eval, arguments.baseline))
        results = results_markdown(runs, baselines, model_sha256(folder))
    write_atomic(folder / CARD, render_card(record, report, folder, results))
    print(f"written: {folder / CARD}")
    return 0


def card_record_of(folder: Path, report: Mapping[str, Any]) -> CardRecord:
    """The records that the export was made with, under the name that its folder has now. SetupError without any."""
    kept = report.get("card")
    if not isinstance(kept, dict):
        raise SetupError(f"{folder / REPORT} holds no records for a card: export the checkpoint again")
    return build_config(kept | {"name": folder.resolve().name}, CardRecord, str(folder / REPORT))


def training_of(run: Path, checkpoint: str, known: Training | None) -> Training:
    """The record of the exported checkpoint in `run`. SetupError when it is not there, or is another one."""
    name = known.checkpoint if known is not None else Path(checkpoint).name
    training = read_training(run / name)
    if training is None:
        raise SetupError(f"--run {run} has no complete {name}, which was exported: give the folder of its run")
    if known is not None and training.weights != known.weights:
        raise SetupError(f"--run {run}: its {name} has other weights than the exported one: give the folder of its run")
    return training


if __name__ == "__main__":
    run_main(main)
