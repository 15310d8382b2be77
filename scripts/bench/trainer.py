"""How fast the update is and how much memory it takes: against TRL's GRPOTrainer, and with and without chunks.

    python scripts/bench/trainer.py step [--rows 32 --longest 1024]      loss, forward and backward of one GRPO step
    python scripts/bench/trainer.py logprobs [--tokens 2048]             log-probs at a vocabulary of 248,320

step: one tiny Qwen3.5-shaped model and the same episodes, lengths spread 1 : 10, on both sides; losses and gradient
norms must agree. TRL pads every episode of a step to the longest and takes a fixed number of rows at a time; it is
measured with each number in --trl-rows. Reference model and optimizer are left out on both sides.
logprobs: a projection alone, forward and backward; "full" holds the logits of all positions.

Each side runs in a process of its own on --threads cores; time is the median of --repeats, memory the peak
beyond what was there before and beyond the gradients. Linux on a CPU. Prints Markdown.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.cli import run_main
from shared.errors import SetupError

MIB = 2**20


def status_bytes(name: str) -> int:
    """A memory figure of this process, in bytes: VmRSS (now) or VmHWM (peak since the last reset)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SetupError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def measured(action: Callable[[], dict[str, float]], gradients: int, repeats: int) -> dict[str, float]:
    """Run `action` `repeats` times: its last figures, median seconds, peak bytes beyond the start and `gradients`."""
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    seconds = []
    figures: dict[str, float] = {}
    for _ in range(repeats):
        started = time.perf_counter()
        figures = action()
        seconds.append(time.perf_counter() - started)
    peak = status_bytes("VmHWM") - before - gradients
    return figures | {"seconds": statistics.median(seconds), "peak": float(max(peak, 0))}


# --- one step -------------------------------------------------------------------------------------------------------


def tiny_model(vocabulary: int) -> Any:
    """Four layers of the real architecture, three linear and one full attention, the same weights in each process."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config)


def episodes(rows: int, longest: int, vocabulary: int) -> list[Any]:
    """Rows of random tokens, lengths evenly from a tenth of the longest up; half of each is sampled, in two turns."""
    import math
    import random

    from train.batch import TrainRow

    rng = random.Random(0)
    prompt = longest // 20
    result = []
    for i in range(rows):
        length = round(longest * (0.1 + 0.9 * i / max(rows - 1, 1)))
        quarter = (length - prompt) // 4
        rest = length - prompt - 3 * quarter
        mask = [0] * prompt + [1] * quarter + [0] * quarter + [0] * (rest - quarter) + [1] * (2 * quarter)
        mask = mask[:length] + [0] * (length - len(mask))
        ids = [rng.randrange(3, vocabulary) for _ in range(length)]
        # A fresh model is nearly uniform: these keep the ratios near 1.
        sampler = [-math.log(vocabulary) * m for m in mask]
        result.append(TrainRow(ids, mask, sampler, rng.gauss(0.0, 1.0)))
    rng.shuffle(result)
    return result


def gradient_norm(model: Any) -> float:
    """Euclidean norm over all gradients, which are then dropped."""
    import torch

    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    model.zero_grad(set_to_none=True)
    return norm


def ours(options: argparse.Namespace) -> dict[str, float]:
    """Our loss over the episodes, in micro-batches of at most --budget padded tokens."""
    from accelerate import Accelerator

    from shared.config import build_config
    from train.config import TrainConfig
    from train.trainer import Trainer

    data = {
        "output": "unused",
        "model": {"path": "unused/unused"},
        "data": {"benchmark": "toy"},
        "loss": {"kl": {"mode": "off"}, "micro_batch_tokens": options.budget, "logprob_chunk": options.chunk},
    }
    model = tiny_model(options.vocabulary)
    trainer = Trainer(build_config(data, TrainConfig, "benchmark"), model, None, Accelerator(cpu=True))
    rows = episodes(options.rows, options.longest, options.vocabulary)
    model.train()

    def step() -> dict[str, float]:
        sums = trainer._accumulate(trainer._micro_batches(rows), len(rows), lambda: None)
        return {"loss": sums.loss, "norm": gradient_norm(model)}

    return measured(step, sum(p.numel() * 4 for p in model.parameters()), options.repeats)


def trl(options: argparse.Namespace) -> dict[str, float]:
    """TRL's loss over the same episodes, padded to the longest of them, --rows-at-a-time rows in a forward pass."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    from train.batch import collate

    model = tiny_model(options.vocabulary)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "x": 2}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    rows = episodes(options.rows, options.longest, options.vocabulary)
    prompt = options.longest // 20
    at_a_time: int = options.rows_at_a_time
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            loss_type="dr_grpo",
            importance_sampling_level="sequence",
            epsilon=0.2,
            epsilon_high=0.28,
            max_completion_length=1024,
            num_generations=2,
            per_device_train_batch_size=max(at_a_time, 2),
            temperature=1.0,
            scale_rewards="none",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
        )
        trainer: Any = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["x"]}),
            processing_class=tokenizer,
        )
    model.train()
    batch = collate(rows)
    lengths = torch.tensor([len(row.ids) for row in rows])
    real = torch.arange(batch.ids.shape[1])[None] < lengths[:, None]
    trainer.current_gradient_accumulation_steps = len(rows) / at_a_time

    def step() -> dict[str, float]:
        total = 0.0
        for start in range(0, len(rows), at_a_time):
            part = slice(start, start + at_a_time)
            loss = trainer._compute_loss(
                model,
                {
                    "prompt_ids": batch.ids[part, :prompt],
                    "prompt_mask": torch.ones_like(batch.ids[part, :prompt]),
                    "completion_ids": batch.ids[part, prompt:],
                    "completion_mask": real[part, prompt:].long(),
                    "tool_mask": batch.mask[part, prompt:].long(),
                    "advantages": batch.advantages[part],
                    "old_per_token_logps": batch.sampler_logprobs[part, prompt:],
                    "num_items_in_batch": torch.tensor(float(batch.mask.sum())),
                },
            )
            loss.backward()
            total += loss.item()
        return {"loss": total, "norm": gradient_norm(model)}

    return measured(step, sum(p.numel() * 4 for p in model.parameters()), options.repeats)


def step_table(options: argparse.Namespace) -> str:
    """Run all sides and compare them with ours."""
    for number in options.trl_rows:
        if number < 1 or options.rows % number:
            raise SetupError(f"--trl-rows {number} does not divide --rows {options.rows}")
    sides = {"ours": child(options, "ours")}
    for number in options.trl_rows:
        sides[f"TRL, {number} rows at a time"] = child(options, "trl", rows_at_a_time=number)
    mine = sides["ours"]
    for name, side in sides.items():
        for key in ("loss", "norm"):
            if abs(side[key] - mine[key]) > 1e-3 * abs(mine[key]) + 1e-6:
                raise SetupError(f"{name}: {key} {side[key]} is not ours, {mine[key]}; nothing to compare")
    tokens = sum(len(row.ids) for row in episodes(options.rows, options.longest, options.vocabulary))
    lines = [
        f"{options.rows} episodes of {options.longest // 10:,} to {options.longest:,} tokens ({tokens:,} together), "
        f"vocabulary {options.vocabulary:,}, {options.threads} core(s); loss {mine['loss']:.5f} and gradient norm "
        f"{mine['norm']:.5f} on all sides",
        "",
        "| side | tokens/s | peak beyond weights and gradients | ours: tokens/s | ours: memory |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, side in sides.items():
        speed, memory = side["seconds"] / mine["seconds"], mine["peak"] / max(side["peak"], 1.0)
        lines.append(
            f"| {name} | {tokens / side['seconds']:,.0f} | {side['peak'] / MIB:,.0f} MiB "
            f"| {speed:.2f}x | {memory:.2f}x |"
        )
    return "\n".join(lines)


# --- log-probabilities ----------------------------------------------------------------------------------------------


def logprobs(options: argparse.Namespace, chunked: bool) -> dict[str, float]:
    """Forward and backward of the log-probs of random targets; the loss and gradient norm are theirs."""
    import torch

    from train.logprobs import selected_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden).requires_grad_()
    weight = (torch.randn(options.vocabulary, options.hidden) / options.hidden**0.5).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,))

    def run() -> dict[str, float]:
        if chunked:
            values = selected_logprobs(hidden, weight, targets, options.chunk)
        else:
            logits = hidden @ weight.T
            values = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(-1)
            del logits
        mean = values.mean()
        (gradient, _) = torch.autograd.grad(mean, (hidden, weight))
        return {"loss": mean.item(), "norm": float(gradient.norm())}

    return measured(run, 4 * (hidden.numel() + weight.numel()), options.repeats)


def logprobs_table(options: argparse.Namespace) -> str:
    """Chunked against full."""
    sides = {"full": child(options, "full"), f"chunks of {options.chunk}": child(options, "chunked")}
    full = sides["full"]
    lines = [
        f"{options.tokens:,} positions, hidden {options.hidden:,}, vocabulary {options.vocabulary:,}, float32, "
        f"{options.threads} core(s)",
        "",
        "| side | seconds | peak beyond weights and gradients | time | memory |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, side in sides.items():
        if abs(side["norm"] - full["norm"]) > 1e-3 * full["norm"]:
            raise SetupError(f"{name}: gradient norm {side['norm']} is not {full['norm']}; nothing to compare")
        time_ratio, memory = side["seconds"] / full["seconds"], side["peak"] / max(full["peak"], 1.0)
        lines.append(
            f"| {name} | {side['seconds']:.2f} | {side['peak'] / MIB:,.0f} MiB | {time_ratio:.2f}x | {memory:.3f}x |"
        )
    return "\n".join(lines)


# --- the command ----------------------------------------------------------------------------------------------------

SIDES: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "ours": ours,
    "trl": trl,
    "full": lambda options: logprobs(options, chunked=False),
    "chunked": lambda options: logprobs(options, chunked=True),
}


def child(options: argparse.Namespace, side: str, **more: int) -> dict[str, float]:
    """One side in a process of its own; SetupError with its last line when it fails."""
    settings = vars(options) | more | {"side": side}
    environment = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "BENCH_SIDE": json.dumps(settings),
        "HF_HUB_OFFLINE": "1",
        # Freed memory goes back at once, so that one repeat's peak is not the next one's floor.
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{side} failed: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    if "BENCH_SIDE" in os.environ:
        options = argparse.Namespace(**json.loads(os.environ["BENCH_SIDE"]))
        import torch

        torch.set_num_threads(options.threads)
        print(json.dumps(SIDES[options.side](options)))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="one GRPO step against TRL")
    step.add_argument("--rows", type=int, default=32)
    step.add_argument("--longest", type=int, default=1024, help="tokens; the shortest has a tenth")
    step.add_argument("--budget", type=int, default=2048, help="padded tokens of one of our micro-batches")
    step.add_argument("--trl-rows", type=int, nargs="+", default=[8, 2], help="rows of one of TRL's micro-batches")
    step.add_argument("--vocabulary", type=int, default=32768)
    step.set_defaults(table=step_table)
    projection = commands.add_parser("logprobs", help="chunked against full log-probabilities")
    projection.add_argument("--tokens", type=int, default=2048)
    projection.add_argument("--hidden", type=int, default=2048)
    projection.add_argument("--vocabulary", type=int, default=248320)
    projection.set_defaults(table=logprobs_table)
    for command in (step, projection):
        command.add_argument("--chunk", type=int, default=512, help="positions whose logits exist at a time")
        command.add_argument("--repeats", type=int, default=3)
        command.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    table = options.table
    del options.table
    print(table(options))
    return 0


if __name__ == "__main__":
    run_main(main)
