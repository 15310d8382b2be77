"""Whether an exported folder is what training measured: `python -m eval.parity --checkpoint … --export … --out DIR`.

Training builds its engine from the base and loads the checkpoint's weights into it; the export is loaded as it is. Both
answer the same questions with the same seeds, paired; the synced side runs twice, which is the noise floor. All score
the same tokens. Every option of eval.run that says what is asked, and how, is taken as well. DIR gets one
run folder a side and mode, parity.json and parity.txt. The same command resumes.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.benchmarks import load_benchmark
from eval.config import EvalConfig
from eval.config import parse_arguments as parse_evaluation
from eval.models import resolve_model
from eval.parity_figures import judge, mode_figures, render
from eval.parity_sides import SIDES, ParityPlan, Side, different_settings, finished, prepare_side, run_side
from eval.records import write_json
from shared.cli import ArgumentParser, run_main
from shared.episode import Mode
from shared.errors import SetupError
from shared.files import check_output, write_atomic

RESULT, TABLE = "parity.json", "parity.txt"
_MODES: dict[str, tuple[Mode, ...]] = {"full": ("full",), "withheld": ("withheld",), "both": ("withheld", "full")}


def parse_arguments(argv: Sequence[str]) -> tuple[ParityPlan, Side | None]:
    """The plan of a command line, and the one side that a process of its own runs. SetupError for what does not fit."""
    parser = ArgumentParser(
        prog="python -m eval.parity",
        description="Hold an exported folder against the checkpoint it came from, paired on the question.",
        epilog="Options of eval.run that say what is asked and how (--benchmark, --questions, --limit, …) work here.",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="model folder that training saved")
    parser.add_argument("--export", type=Path, required=True, help="folder that export_merged.py made of it")
    parser.add_argument("--base", help="folder or cached hub id that training's engine is built from (vllm: required)")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="default: hf")
    parser.add_argument("--mode", choices=tuple(_MODES), default="both", help="default: both")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the result")
    # For the processes that this command starts.
    parser.add_argument("--side", choices=SIDES, help="run only this side")
    given, rest = parser.parse_known_args(argv)
    if unfit := [word for word in rest if word.split("=")[0] in ("--model", "--base-url", "--tokenizer", "--vote")]:
        raise SetupError(f"{unfit[0]} does not fit here: the models are --checkpoint and --export, --samples asks more")
    evaluation: EvalConfig = parse_evaluation([*rest, "--engine", given.engine, "--model", str(given.export)])
    for flag in ("checkpoint", "export"):
        if not getattr(given, flag).is_dir():
            raise SetupError(f"--{flag} {getattr(given, flag)} is no folder: give a local folder with the weights")
    if given.engine == "vllm" and given.base is None:
        raise SetupError(
            "--engine vllm needs --base: training's engine is built from it, and the weights are loaded in"
        )
    base = None if given.base is None else resolve_model(given.base)
    plan = ParityPlan(given.checkpoint, given.export, base, _MODES[given.mode], given.out, evaluation)
    return plan, given.side


def check(plan: ParityPlan) -> dict[str, Any]:
    """All that can be wrong before a model is loaded, and the comparison of the weights, tensor by tensor."""
    from shared.engines.checkpoint_weights import compare_language_weights, refuse_other_shapes

    check_output(plan.out / RESULT, "--out")
    for mode in plan.modes:
        load_benchmark(plan.config("export", mode))
    if plan.base is not None:
        refuse_other_shapes(plan.checkpoint, plan.base)
    sides = {side: prepare_side(plan, side) for side in SIDES}
    if sides["synced"].codec.template_sha256 != sides["export"].codec.template_sha256:
        raise SetupError(
            f"{plan.engine_folder('synced')} and {plan.export} have different chat templates: "
            "export again from this base"
        )
    for side, prepared in sides.items():
        for mode in plan.modes:
            finished(plan.config(side, mode), prepared)
    weights = dataclasses.asdict(compare_language_weights(plan.checkpoint, plan.export))
    return weights | {"settings": different_settings(plan.checkpoint, plan.export)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 1 when the export differs, by the rule in parity.json."""
    words = list(sys.argv[1:] if argv is None else argv)
    plan, side = parse_arguments(words)
    if side is not None:
        run_side(plan, side)
        return 0
    weights = check(plan)
    for each in SIDES:
        if plan.evaluation.engine == "hf":
            run_side(plan, each)
        elif code := _in_a_process(words, each):
            return code
    result = judge(weights, [mode_figures(plan, mode) for mode in plan.modes])
    result |= {
        "checkpoint": str(plan.checkpoint),
        "export": str(plan.export),
        "base": None if plan.base is None else str(plan.base),
        "engine": plan.evaluation.engine,
        "runs": {f"{name}-{mode}": str(plan.run_folder(name, mode)) for name in SIDES for mode in plan.modes},
    }
    write_json(plan.out / RESULT, result)
    text = render(result)
    write_atomic(plan.out / TABLE, text + "\n")
    print(text)
    return 1 if result["differs"] else 0


def _in_a_process(words: Sequence[str], side: Side) -> int:
    """Run one side: vLLM does not give back all that it took, and a second engine shall be a start like the first.

    Returns the exit code; the process has said itself what was wrong.
    """
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "eval.parity", *words, "--side", side]
    code = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if code not in (0, 2, 130):
        raise SetupError(f"the side {side} ended with exit code {code}: see above; run the same command to go on")
    return code


if __name__ == "__main__":
    run_main(main)
