"""Train with GRPO.

    python -m train.run --config configs/grpo_curriculum.yaml [key=value …]
    python -m train.run --config configs/grpo_curriculum.yaml --dry-run --ranks 3
    torchrun --nproc-per-node 3 -m train.run --config configs/grpo_curriculum.yaml

The run's folder is the config's `output`: metrics.jsonl (one line a step), episodes/ (sampled transcripts),
checkpoint-step-N/ (model folder plus optimizer state) and config.yaml as resolved; with validation on, also
validation.jsonl and `best`, which points to the checkpoint that did best on the held-out questions. Starting again with
the same folder continues from the newest complete checkpoint. SIGTERM, SIGUSR1, Ctrl-C or a file named STOP in the
folder end the run after saving the last finished step: exit code 75 (requeue), 130 after Ctrl-C.
"""

import os
import sys
from pathlib import Path

from shared.cli import ArgumentParser, run_main
from shared.config import dump_config
from shared.errors import SetupError
from train.config import TrainConfig, load_train_config
from train.pool import TOY, TOY_HELD_OUT, check_draws, load_pool
from train.stopping import LOCK, STOP_FILE, StopFlag

CONFIG_COPY = "config.yaml"
# What a run that was killed early may have left without a config.yaml.
_OWN = {TOY, TOY_HELD_OUT, LOCK, STOP_FILE}


def check_output(output: Path) -> None:
    """SetupError when the folder holds something that is not a run of ours."""
    if output.exists() and not output.is_dir():
        raise SetupError(f"output: {output} is a file; give a folder")
    if not output.is_dir() or (output / CONFIG_COPY).is_file():
        return
    if any(path.name not in _OWN for path in output.iterdir()):
        raise SetupError(f"output: {output} holds other files and no run; give an empty or new folder")


def check_ranks(config: TrainConfig, ranks: int) -> None:
    """SetupError when that many ranks cannot share the run."""
    if config.rollout.questions % ranks:
        raise SetupError(f"rollout.questions {config.rollout.questions} does not divide by {ranks} ranks")
    if config.parallel == "fsdp" and ranks == 1:
        raise SetupError(
            "parallel: fsdp spreads a model over ranks, and there is one; use ddp, or start it with torchrun "
            "(a dry run: with --ranks)"
        )


def train(config: TrainConfig) -> int:
    """Run (or continue) training; returns the exit code. All that can be refused is refused before a model loads."""
    from train.lora import check_targets
    from train.model import load_codec, model_folder
    from train.optim import check_optimizer

    check_output(config.output)
    check_ranks(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_optimizer(config.optimizer)
    load_codec(config.model.path, config.model.revision)
    if config.model.lora is not None:
        check_targets(model_folder(config.model.path, config.model.revision), config.model.lora)
    from accelerate import PartialState

    from train.validation import load_held_out

    # One process writes the toy databases, or fills the hub's cache; the others find them there.
    with PartialState(cpu=config.device == "cpu").main_process_first():
        pool = load_pool(config.data, config.output, config.seed, _say)
        held_out = load_held_out(config, pool.examples, _say)
    check_draws(pool, config.curriculum.mix, config.rollout.questions)
    _say(dump_config(config))
    from train.loop import run_training

    stop = StopFlag(config.output)
    with stop.installed():
        return run_training(config, pool, stop, held_out=held_out)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _say(line: str) -> None:
    """A line on the terminal, from the first of several ranks alone."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and train."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = ArgumentParser(prog="python -m train.run", description=summary)
    parser.add_argument("--config", type=Path, required=True, help="a YAML file; see configs/")
    parser.add_argument("--dry-run", action="store_true", help="print config, pool, memory and time plan, and leave")
    plan = parser.add_argument_group("what a dry run assumes")
    plan.add_argument("--ranks", type=_positive, default=int(os.environ.get("WORLD_SIZE", "1")), help="default 1")
    plan.add_argument("--mean-tokens", type=_positive, default=0, help="of an episode; default a quarter of its budget")
    plan.add_argument("--tflops", type=_positive, default=150, help="matrix rate that a rank reaches, default 150")
    plan.add_argument("--decode-rate", type=_positive, default=1500, help="tokens/s that a rank samples, default 1500")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted config keys, e.g. optimizer.lr=1e-5")
    arguments = parser.parse_args(argv)
    config = load_train_config(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from train.plan import Assumptions, dry_run

        return dry_run(
            config,
            Assumptions(arguments.ranks, arguments.mean_tokens, arguments.tflops, arguments.decode_rate),
        )
    return train(config)


if __name__ == "__main__":
    run_main(main)
