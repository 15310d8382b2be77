"""Whole runs that roll out with a pretended server: it dies, is started anew, the run is stopped; each goes on."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError
from tests.train.conftest import VOCABULARY
from tests.train.fake_vllm import FakeVllm
from tests.train.scripted_run import assert_same_run, make_config, metrics, shop_pool
from tests.train.test_weight_sync import MakeModel
from train.checkpoint import newest_complete
from train.loop import run_training
from train.reward import Score
from train.rollout import Scorer
from train.rollout_engines import make_rollout_engine
from train.stopping import EXIT_REQUEUE, STOP_FILE, StopFlag


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that differ within each group, so that each step changes the weights."""
    monkeypatch.setattr(
        Scorer,
        "score",
        lambda self, example, answers: [Score(i % 3, "invalid", False, 0, 0, 0, 0) for i in range(len(answers))],
    )


def run(folder: Path, model: Path, fake: FakeVllm, url: str) -> int:
    config = make_config(
        folder,
        model,
        [
            *("steps=3", "checkpoint.every=1", "loss.ratio=none", "gate.mean_gap=100", "reward.degenerate_sample=0"),
            *("rollout.engine=server", f"rollout.servers=[{url}]", "rollout.questions=2", "rollout.concurrency=4"),
        ],
    )

    def make(policy: Any, trainer: Any) -> Any:
        engine = make_rollout_engine(policy, trainer)
        for client in engine.servers:  # type: ignore[attr-defined]
            object.__setattr__(client.completions, "patience", 0.5)
        return engine

    return run_training(config, shop_pool(folder), StopFlag(config.output), make)


@pytest.mark.usefixtures("scored")
def test_a_run_whose_server_dies_or_restarts_in_a_step_ends_clearly_and_goes_on_from_its_checkpoint(
    stack: ExitStack, make_model: MakeModel, model_folder: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(make_model(), VOCABULARY, max_model_len=8000)
    url = stack.enter_context(fake.serving())[0].url
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    assert run(tmp_path / "whole", model_folder, fake, url) == 0
    whole = metrics(tmp_path / "whole")
    assert len({line["weights"] for line in whole}) == 3
    a_step = len(fake.prompts) // 3

    fake.restart()
    fake.prompts = []
    fake.dies_after = a_step + a_step // 2
    with pytest.raises(SetupError, match=r"(broke off|cannot be reached).*see that it runs"):
        run(tmp_path / "broken", model_folder, fake, url)
    output = tmp_path / "broken" / "run"
    assert newest_complete(output) == (1, output / "checkpoint-step-1")
    assert not list(output.glob("sync*"))

    fake.restart()
    fake.dies_after, fake.restarts_after = None, len(fake.prompts) + a_step + a_step // 2
    with pytest.raises(SetupError, match="samples with the weights default and not with"):
        run(tmp_path / "broken", model_folder, fake, url)
    assert newest_complete(output) == (2, output / "checkpoint-step-2")
    assert run(tmp_path / "broken", model_folder, fake, url) == 0
    assert_same_run(metrics(tmp_path / "broken"), whole)


@pytest.mark.usefixtures("scored")
def test_a_stop_while_servers_sample_leads_to_a_save_and_the_same_run_later(
    stack: ExitStack, make_model: MakeModel, model_folder: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(make_model(), VOCABULARY, max_model_len=8000)
    url = stack.enter_context(fake.serving())[0].url
    (tmp_path / "whole").mkdir()
    assert run(tmp_path / "whole", model_folder, fake, url) == 0
    whole, a_step = metrics(tmp_path / "whole"), len(fake.prompts) // 3

    generate, asked = fake._generate, 0

    def generate_and_stop(body: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == a_step + a_step // 2:
            (tmp_path / "stopped" / "run" / STOP_FILE).touch()
            time.sleep(1.2)  # the flag is looked at once a second
        return generate(body)

    fake._generate = generate_and_stop  # type: ignore[method-assign]
    (tmp_path / "stopped").mkdir()
    assert run(tmp_path / "stopped", model_folder, fake, url) == EXIT_REQUEUE
    assert len(metrics(tmp_path / "stopped")) == 1
    assert run(tmp_path / "stopped", model_folder, fake, url) == 0
    assert_same_run(metrics(tmp_path / "stopped"), whole)
