"""The supervised warm start: a base model learns the protocol from an oracle's deliberately imperfect traces.

    python -m train.warmstart --config configs/demo_warmstart.yaml [key=value …]

makes toy questions and traces (see train/traces.py), trains on the oracle's tokens, and writes `output`, a model
folder with tokenizer and chat template.

A plain loop on purpose: TRL's SFTTrainer with the same rows and optimizer has the same losses (a test holds the two
together), but took 1.75 times the CPU time a step on the demo's model.
"""

import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from shared.cli import ArgumentParser, run_main
from shared.config import StrictModel, load_config
from shared.data.toy import toy_questions, write_toy
from shared.engines.hf_load import hide_kernels
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox
from train.config import ModelConfig, NonNegativeInt, OptimizerConfig, PositiveInt
from train.log import format_seconds
from train.model import Policy, check_model_path, load_codec, load_model, save_policy
from train.optim import build_optimizers, lr_scale
from train.traces import Trace, TraceMix, oracle_traces

_BUCKET = 16  # batches that are sorted by length together


class WarmStartConfig(StrictModel):
    """One warm start from `model.path`. `output` is the model folder to write.

    data: where the toy questions and databases go (default: beside the output, named <output>-data).
    databases, questions: how many to make; each question gives one trace. steps of `batch` traces each.
    threads: of torch (0: its own choice).
    """

    output: Path
    data: Path | None = None
    model: ModelConfig
    seed: NonNegativeInt = 0
    databases: PositiveInt = 400
    questions: PositiveInt = 4000
    traces: TraceMix = TraceMix()
    steps: PositiveInt = 500
    batch: PositiveInt = 16
    log_every: PositiveInt = 25
    threads: NonNegativeInt = 0
    optimizer: OptimizerConfig = OptimizerConfig()


def batches(traces: Sequence[Trace], size: int, rng: random.Random) -> Iterator[list[Trace]]:
    """Batches without end: passes over the traces in random order, those of similar length together.

    A pass drops what does not fill a batch. ValueError when there are fewer traces than a batch has.
    """
    if len(traces) < size:
        raise ValueError(f"{len(traces)} traces do not fill a batch of {size}")
    while True:
        order = rng.sample(range(len(traces)), len(traces))
        for start in range(0, len(order), size * _BUCKET):
            bucket = sorted(order[start : start + size * _BUCKET], key=lambda i: len(traces[i].ids))
            groups = [bucket[i : i + size] for i in range(0, len(bucket), size)]
            rng.shuffle(groups)
            yield from ([traces[i] for i in group] for group in groups if len(group) == size)


def imitation_loss(model: PreTrainedModel, batch: Sequence[Trace]) -> torch.Tensor:
    """Mean cross-entropy (nats a token) of the oracle's tokens given all that stands before them.

    Rows are padded at the right: nothing that counts comes after the padding, so it needs no mask. Logits are
    computed at the positions that predict a counted token, and nowhere else.
    """
    width = max(len(trace.ids) for trace in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    counted = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, trace in enumerate(batch):
        ids[row, : len(trace.ids)] = torch.tensor(trace.ids)
        counted[row, : len(trace.ids)] = torch.tensor(trace.mask, dtype=torch.bool)
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[:, :-1][counted[:, 1:]])
    return cross_entropy(logits, ids[:, 1:][counted[:, 1:]])


def fit(model: PreTrainedModel, traces: Sequence[Trace], config: WarmStartConfig) -> float:
    """Train in place; returns the mean loss of the last tenth of the steps."""
    optimizers = build_optimizers(model, config.optimizer)
    source = batches(traces, config.batch, random.Random(config.seed))
    losses: list[float] = []
    tokens, started = 0, time.monotonic()
    model.train()
    for step in range(config.steps):
        optimizers.set_scale(lr_scale(step, config.steps, config.optimizer))
        batch = next(source)
        loss = imitation_loss(model, batch)
        optimizers.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizers.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise SetupError(f"the loss is {losses[-1]} at step {step + 1}; lower optimizer.lr or optimizer.muon_lr")
        tokens += sum(len(trace.ids) for trace in batch)
        if (step + 1) % config.log_every == 0 or step + 1 == config.steps:
            seconds = time.monotonic() - started
            recent = losses[-config.log_every :]
            eta = format_seconds(seconds / (step + 1) * (config.steps - step - 1))
            print(
                f"warm start  step {step + 1}/{config.steps}  loss {sum(recent) / len(recent):.3f}  "
                f"{tokens / seconds:.0f} tok/s  ETA {eta}",
                file=sys.stderr,
            )
    model.eval()
    last = losses[-max(config.steps // 10, 1) :]
    return sum(last) / len(last)


def warm_start(config: WarmStartConfig) -> Path:
    """Make the traces, train, and write the checkpoint folder; returns it.

    Raises SetupError for what can't be used, before the model is loaded.
    """
    check_output(config.output)
    check_model_path(config.model.path)
    if config.questions < config.batch:
        raise SetupError(f"questions: {config.questions} do not fill a batch of {config.batch}; lower batch")
    tokenizer, codec = load_codec(config.model.path)
    if config.threads:
        torch.set_num_threads(config.threads)
    started = time.monotonic()
    questions = toy_questions("train", config.databases, config.questions, config.seed)
    examples = write_toy(questions, config.data or config.output.with_name(f"{config.output.name}-data"))
    with Sandbox(1) as sandbox:
        traces = list(oracle_traces(questions, examples, codec, sandbox, config.traces, config.seed))
    length = sum(len(trace.ids) for trace in traces) / len(traces)
    seconds = format_seconds(time.monotonic() - started)
    print(
        f"{len(traces)} traces of {length:.0f} tokens over {config.databases} databases in {seconds}", file=sys.stderr
    )
    torch.manual_seed(config.seed)
    hide_kernels("cpu")
    model = load_model(config.model)
    fit(model, traces, config)
    try:
        scratch = config.output.with_name(f"{config.output.name}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        save_policy(Policy(model, tokenizer, codec), scratch)
        os.replace(scratch, config.output)  # an output folder is complete or absent
    except (OSError, SafetensorError) as error:
        raise SetupError(f"output: {config.output} cannot be written: {error}; give another folder") from error
    return config.output


def check_output(output: Path) -> None:
    """SetupError when the folder is in use."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SetupError(f"output: {output} exists already; remove it or give another folder")


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = ArgumentParser(prog="python -m train.warmstart", description="Supervised warm start.")
    parser.add_argument("--config", type=Path, required=True, help="a YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted config keys, e.g. steps=300")
    arguments = parser.parse_args(argv)
    output = warm_start(load_config(arguments.config, WarmStartConfig, arguments.overrides))
    print(f"{output}: warm-started model")


if __name__ == "__main__":
    run_main(lambda: main())
