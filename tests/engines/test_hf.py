"""The HF engine: what it samples and reports is what the model alone would say, whatever shares the batch."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from shared.engines.base import Completion, Request, SamplingParams
from shared.engines.hf import HFEngine
from shared.engines.hf_load import missing_kernels
from shared.engines.sampling import sample_tokens, truncated_probs
from shared.errors import SetupError

VOCABULARY = 97
LAYOUTS = {
    "canonical": ["linear_attention"] * 3 + ["full_attention"],
    "full_first": ["full_attention"] * 2 + ["linear_attention"],
}


def tiny_model(layout: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if layout == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
    else:
        model = Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=len(LAYOUTS[layout]),
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                layer_types=LAYOUTS[layout],
                tie_word_embeddings=True,
            )
        )
    # The default initialization is so small that every next token is about equally likely: no test of anything.
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


class Client:
    """Sessions of several turns with random tool results, as the runner would drive them."""

    def __init__(self, engine: HFEngine, sessions: int, turns: int, sampling: SamplingParams) -> None:
        self.engine, self.turns, self.sampling = engine, turns, sampling
        self.contexts: dict[str, list[int]] = {}
        self.completions: dict[str, list[tuple[int, Completion]]] = {}
        for i in range(sessions):
            rng = random.Random(i)
            # Every fourth prompt is the same one, and some are a single token.
            prompt = [7, 8, 9] if i % 4 == 0 else [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 25))]
            self.contexts[f"s{i}"], self.completions[f"s{i}"] = prompt, []

    def ask(self, session: str) -> None:
        turn = len(self.completions[session])
        rng = random.Random(f"{session}{turn}")
        params = SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            max_tokens=rng.randint(1, 15),
            seed=rng.getrandbits(60),
            stop_token_ids=(5, 6),
        )
        self.engine.add(Request(f"{session}#{turn}", tuple(self.contexts[session]), params, session=session))

    def run(self, order: Sequence[str] | None = None) -> None:
        for session in order or list(self.contexts):
            self.ask(session)
        while self.engine.has_work():
            for completion in self.engine.step():
                session = completion.request_id.partition("#")[0]
                rng = random.Random(f"tool{session}{len(self.completions[session])}")
                context = self.contexts[session]
                self.completions[session].append((len(context), completion))
                context.extend(completion.token_ids)
                if len(self.completions[session]) < self.turns:
                    context.extend(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 9, 20])))
                    self.ask(session)
                else:
                    self.engine.end_session(session)


PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=0)


@pytest.mark.parametrize("layout", [*LAYOUTS, "llama"])
def test_logprobs_are_those_of_one_forward_over_the_whole_context(layout: str) -> None:
    model = tiny_model(layout)
    client = Client(HFEngine(model, max_rows=6, chunk_tokens=8, prefill_tokens=60), 16, 3, PLAIN)
    client.run()
    checked = 0
    for session, context in client.contexts.items():
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([context])).logits[0].float(), -1)
        assert len(client.completions[session]) == 3
        for start, completion in client.completions[session]:
            assert len(completion.token_ids) == len(completion.logprobs)
            assert context[start : start + len(completion.token_ids)] == list(completion.token_ids)
            for k, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                assert logprob == pytest.approx(float(expected[start + k - 1, token]), abs=1e-3)
                checked += 1
    assert checked > 200


@pytest.mark.parametrize("layout", ["canonical", "full_first"])
def test_a_sample_depends_on_its_seed_not_on_its_neighbours(layout: str) -> None:
    model = tiny_model(layout)
    together = Client(HFEngine(model, chunk_tokens=8), 12, 3, PLAIN)
    together.run()
    alone = Client(HFEngine(model, max_rows=1, chunk_tokens=1000), 12, 3, PLAIN)
    alone.run(list(reversed(alone.contexts)))
    assert together.contexts == alone.contexts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_computes_nan_is_refused(temperature: float) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[3, 3] = float("nan")
    engine = HFEngine(model)
    engine.add(Request("q#0", (1, 2, 3), SamplingParams(temperature=temperature, max_tokens=2)))
    with pytest.raises(SetupError, match="q#0: the model's log-probabilities are NaN"):
        engine.step()


def test_greedy_is_the_argmax() -> None:
    model = tiny_model("canonical")
    client = Client(HFEngine(model), 6, 2, SamplingParams(temperature=0.0))
    client.run()
    for session, context in client.contexts.items():
        with torch.no_grad():
            best = model(torch.tensor([context])).logits[0].argmax(-1).tolist()
        for start, completion in client.completions[session]:
            assert best[start - 1 : start - 1 + len(completion.token_ids)] == list(completion.token_ids)


def test_stops_limits_and_foreign_histories() -> None:
    model = tiny_model("full_first")
    engine = HFEngine(model, weights=lambda: "w1")
    engine.add(Request("a#0", (1, 2, 3), SamplingParams(temperature=1.0, max_tokens=4, seed=1), session="a"))
    engine.add(
        Request(
            "b#0", (1, 2, 3), SamplingParams(1.0, 1.0, 0, 400, seed=2, stop_token_ids=tuple(range(50))), session="b"
        )
    )
    done: dict[str, Completion] = {}
    while engine.has_work():
        done.update((c.request_id, c) for c in engine.step())
    assert (done["a#0"].stop_reason, len(done["a#0"].token_ids)) == ("length", 4)
    assert done["b#0"].stop_reason == "stop"
    assert done["b#0"].token_ids[-1] < 50
    assert all(token >= 50 for token in done["b#0"].token_ids[:-1])
    assert done["a#0"].weights == "w1"
    # The session comes back with a history that is not its own: it must not continue on the old cache.
    foreign = (4, 4, 4, *done["a#0"].token_ids, 9)
    engine.add(Request("a#1", foreign, SamplingParams(temperature=0.0, max_tokens=1), session="a"))
    (completion,) = [c for _ in range(3) if engine.has_work() for c in engine.step()]
    with torch.no_grad():
        assert int(model(torch.tensor([foreign])).logits[0, -1].argmax()) == completion.token_ids[0]
    with pytest.raises(ValueError, match="empty prompt"):
        engine.add(Request("c", (), SamplingParams()))


def test_truncation_keeps_the_smallest_set_and_the_reported_logprob_is_untruncated() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    logits = probs.log()
    cases: list[tuple[float, int, list[float]]] = [
        (1.0, 0, [0.5, 0.25, 0.15, 0.1]),
        (1.0, 2, [2 / 3, 1 / 3, 0, 0]),
        (0.7, 0, [0.5, 0.25, 0, 0]),
        (0.76, 0, [0.5, 0.25, 0.15, 0]),
        (0.0, 0, [0.5, 0, 0, 0]),
        (0.6, 3, [0.5 / 0.9, 0.25 / 0.9, 0, 0]),
    ]
    for top_p, top_k, expected in cases:
        kept = truncated_probs(logits, top_p, top_k)[0]
        total = sum(expected)
        assert (kept / kept.sum() * total).tolist() == pytest.approx(expected, abs=1e-6)
    for u, token in [(0.0, 0), (0.66, 0), (0.67, 1), (1 - 2**-53, 1)]:
        tokens, logprobs = sample_tokens(logits, [SamplingParams(1.0, 1.0, 2)], [u])
        assert tokens == [token]
        assert logprobs[0] == pytest.approx(float(logits[0, token]), abs=1e-6)


def test_sampling_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().repeat(4000, 1)
    uniforms = torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    tokens, _ = sample_tokens(logits, [PLAIN] * 4000, uniforms)
    shares = [tokens.count(i) / 4000 for i in range(4)]
    assert shares == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.03)


RUN_ON_CPU = """
import sys
from pathlib import Path
{before}
from shared.engines.base import Request, SamplingParams
from shared.engines.hf_load import load_engine
engine = load_engine(Path(sys.argv[1]), weights="w", device="cpu")
engine.add(Request("q", (1, 2, 3), SamplingParams(max_tokens=2)))
while engine.has_work():
    engine.step()
"""


def test_kernels_for_a_gpu_are_not_taken_on_the_cpu(tmp_path: Path) -> None:
    tiny_model("canonical").save_pretrained(tmp_path / "model")
    kernels = tmp_path / "fla" / "ops"
    kernels.mkdir(parents=True)
    for folder in (kernels.parent, kernels):
        (folder / "__init__.py").touch()
    (kernels / "gated_delta_rule.py").write_text(
        "def chunk_gated_delta_rule(*args, **kwargs):\n    raise RuntimeError('wants a GPU')\n"
        "fused_recurrent_gated_delta_rule = chunk_gated_delta_rule\n"
    )

    def run(before: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        command = [sys.executable, "-c", RUN_ON_CPU.format(before=before), str(tmp_path / "model")]
        return subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120
        )

    result = run("")
    assert result.returncode == 0, result.stderr
    # Without the precaution transformers takes them: the test would notice.
    assert "wants a GPU" in run("import transformers.models.qwen3_5.modeling_qwen3_5").stderr


def test_missing_kernels_are_named_where_they_count() -> None:
    hybrid, plain = tiny_model("canonical").config, tiny_model("llama").config
    assert "pip install -e '.[gpu]'" in (missing_kernels(hybrid, "cuda") or "")
    assert missing_kernels(hybrid, "cpu") is None
    assert missing_kernels(plain, "cuda") is None
