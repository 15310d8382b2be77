"""Rollouts from servers: weights are proven or refused, restarts noticed, and runs go on after both."""

import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared.engines import vllm_server
from shared.engines.base import Completion, Request, SamplingParams
from shared.engines.vllm_server import WORKER, server_arguments
from shared.engines.vllm_server_client import UNPROVEN, VllmServer
from shared.errors import SetupError
from tests.train.conftest import VOCABULARY
from tests.train.fake_vllm import FakeVllm
from tests.train.scripted_run import make_config
from tests.train.test_weight_sync import LAYER_3_V, MakeModel, shapes, shift
from train import servers as module
from train.config import RolloutConfig
from train.rollout_engines import check_rollout_engine
from train.servers import ADDRESSES, ServerRollouts, ServerSync, WeightFolder, server_addresses, share
from train.weight_sync import fingerprint

ROOT = Path(__file__).resolve().parents[2]


class Setting:
    """A live model, fake servers of it, and the engine of the only rank."""

    def __init__(self, stack: ExitStack, model: nn.Module, folder: Path, n: int = 1) -> None:
        self.model = model
        self.fakes = [FakeVllm(model, VOCABULARY) for _ in range(n)]
        self.clients = [stack.enter_context(fake.serving())[1] for fake in self.fakes]
        self.folder = WeightFolder(folder / "sync", writes=True)
        self.sync = ServerSync(model, self.clients, self.folder)
        self.engine = ServerRollouts(self.clients, self.sync, lambda: fingerprint(model), concurrency=4)
        stack.callback(self.engine.close)

    @property
    def fake(self) -> FakeVllm:
        return self.fakes[0]

    def sample(self, *sessions: str) -> list[Completion]:
        for session in sessions:
            self.engine.add(request(session))
        return sorted(self.drain(), key=lambda completion: completion.request_id)

    def drain(self) -> list[Completion]:
        done: list[Completion] = []
        while self.engine.has_work():
            done += self.engine.step()
        return done


def request(session: str, turn: int = 0, seed: int = 3) -> Request:
    return Request(f"{session}#{turn}", (1, 2, 3), SamplingParams(1.0, 1.0, 0, 8, seed, (5,)), session)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def setting(stack: ExitStack, make_model: MakeModel, tmp_path: Path) -> Setting:
    return Setting(stack, make_model(), tmp_path)


# ---- weights


def test_weights_go_over_are_proven_and_named_by_each_completion(setting: Setting) -> None:
    setting.engine.refresh()
    (done,) = setting.sample("a")
    assert done.weights == setting.fake.label == fingerprint(setting.model)
    assert done.stop_reason == "stop"
    assert done.token_ids[-1] == 5
    assert len(setting.fake.engine.loaded) == len(shapes(setting.model)) == 3 * 14 + 11 + 2
    assert not setting.folder.files, "what all servers have is removed"
    assert not list((setting.folder._base).parent.glob("sync*"))


def test_they_go_over_when_they_changed_and_only_then(setting: Setting) -> None:
    for _ in range(3):
        setting.engine.refresh()
        setting.sample("a")
    assert (setting.fake.loads, setting.engine.syncs) == (1, 1)
    before = fingerprint(setting.model)
    shift(setting.model)
    with pytest.raises(RuntimeError, match="refresh comes first"):
        setting.engine.add(request("b"))
    setting.engine.refresh()
    (done,) = setting.sample("b")
    assert done.weights == fingerprint(setting.model) != before
    assert (setting.fake.loads, setting.engine.syncs) == (2, 2)


def test_a_tensor_that_the_server_skips_is_named_and_nothing_is_sampled(setting: Setting) -> None:
    setting.engine.refresh()
    for name in (LAYER_3_V, "model.embed_tokens.weight", "model.layers.0.linear_attn.A_log"):
        shift(setting.model)
        setting.fake.engine.skip = {name}
        with pytest.raises(SetupError, match=f"weight sync: {name} is not what"):
            setting.engine.refresh()
        assert setting.fake.label == UNPROVEN
        with pytest.raises(RuntimeError, match="refresh comes first"):
            setting.engine.add(request("a"))
    setting.fake.engine.skip = set()
    setting.engine.refresh()
    assert setting.sample("a")[0].weights == fingerprint(setting.model)


def test_files_that_are_not_complete_are_refused_by_the_server(setting: Setting, monkeypatch: Any) -> None:
    add = WeightFolder.add
    monkeypatch.setattr(
        WeightFolder,
        "add",
        lambda self, name, tensor: None if name.endswith("3.mlp.up_proj.weight") else add(self, name, tensor),
    )
    with pytest.raises(
        SetupError, match=r"cannot receive weights: .* have 54 tensors and not these 55: .*3\.mlp\.up_proj"
    ):
        setting.engine.refresh()
    assert setting.fake.label == UNPROVEN
    assert setting.fake.engine.loaded == []


def test_a_folder_that_the_server_does_not_see_is_said(setting: Setting, monkeypatch: Any) -> None:
    monkeypatch.setattr(WeightFolder, "flush", lambda self: self.files.append(self._folder / "weights.safetensors"))
    with pytest.raises(SetupError, match="cannot receive weights: FileNotFoundError"):
        setting.engine.refresh()


def test_numbers_that_are_not_finite_never_leave_the_trainer(setting: Setting) -> None:
    setting.engine.refresh()
    good = fingerprint(setting.model)
    with torch.no_grad():
        setting.model.get_parameter(LAYER_3_V)[1, 2] = math.nan
    with pytest.raises(SetupError, match="holds 1 numbers that are not finite"):
        setting.engine.refresh()
    assert (setting.fake.label, setting.fake.loads) == (good, 1)


def test_several_files_hold_what_one_would(setting: Setting, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "_FILE_NUMBERS", 2000)
    written: list[int] = []
    load = VllmServer.load
    monkeypatch.setattr(
        VllmServer, "load", lambda self, files, *more: written.append(len(files)) or load(self, files, *more)
    )
    setting.engine.refresh()
    assert written[0] > 5
    assert setting.fake.label == fingerprint(setting.model)


def test_servers_of_another_model_are_refused(stack: ExitStack, make_model: MakeModel, tmp_path: Path) -> None:
    fake = FakeVllm(make_model(), VOCABULARY)
    lacking = dict(fake.engine.model.named_modules())["language_model.model"]
    del lacking.norm
    _, client = stack.enter_context(fake.serving())
    with pytest.raises(SetupError, match=r"the engine has no place for model\.norm\.weight"):
        ServerSync(make_model(), [client], WeightFolder(tmp_path, writes=True))


# ---- restarts, deaths


def test_a_server_started_anew_gets_the_weights_again_before_it_samples(setting: Setting) -> None:
    setting.engine.refresh()
    setting.sample("a")
    setting.fake.restart()
    setting.engine.refresh()
    assert setting.sample("a")[0].weights == fingerprint(setting.model)
    assert setting.engine.syncs == 2


def test_a_server_started_anew_between_two_turns_is_noticed_by_its_first_answer(setting: Setting) -> None:
    setting.engine.refresh()
    setting.sample("a")
    setting.fake.restart()
    setting.engine.add(request("a", turn=1))
    with pytest.raises(SetupError, match=r"samples with the weights default and not with .* started anew"):
        setting.drain()


def test_another_trainer_at_the_same_server_is_noticed(setting: Setting, make_model: MakeModel, tmp_path: Path) -> None:
    setting.engine.refresh()
    other = make_model(seed=1)
    ServerSync(other, setting.clients, WeightFolder(tmp_path / "other", writes=True)).push(fingerprint(other))
    setting.engine.add(request("a"))
    with pytest.raises(SetupError, match=f"samples with the weights {fingerprint(other)} and not with"):
        setting.drain()


def test_a_dead_server_is_given_up_after_some_patience(setting: Setting) -> None:
    setting.engine.refresh()
    setting.fake.dead = True
    setting.engine.add(request("a"))
    with pytest.raises(SetupError, match="broke off"):
        setting.drain()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda answer: answer["choices"][0].pop("weight_versions"), "without ids and weights"),
        (lambda answer: answer["choices"][0].update(logprobs=None), "without ids and weights"),
        (lambda answer: answer["choices"][0]["logprobs"]["content"].pop(), "broke a completion off"),
        (lambda answer: answer["choices"][0].update(finish_reason="abort"), "broke a completion off"),
        (
            lambda answer: answer["choices"][0]["weight_versions"].append({"version": "x", "start": 6, "end": 6}),
            "samples with the weights",
        ),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(setting: Setting, change: Any, said: str) -> None:
    setting.engine.refresh()
    whole = setting.fake._generate

    def generate(body: Any) -> Any:
        answer = whole(body)
        change(answer)
        return answer

    setting.fake._generate = generate  # type: ignore[method-assign]
    setting.engine.add(request("a"))
    with pytest.raises(SetupError, match=said):
        setting.drain()


def test_after_a_reset_no_old_answer_is_taken_for_a_new_one(setting: Setting) -> None:
    setting.engine.refresh()
    for seed in range(8):
        setting.engine.add(request("a", turn=seed, seed=seed))
    setting.engine.reset()
    assert not setting.engine.has_work()
    fresh = {seed: setting.clients[0].sample(request("a", 0, seed), setting.fake.label).token_ids for seed in (0, 9)}
    setting.engine.add(request("a", turn=0, seed=9))
    assert [completion.token_ids for completion in setting.drain()] == [fresh[9]] != [fresh[0]]


def test_whoever_answers_first_each_completion_is_of_its_own_prompt(setting: Setting) -> None:
    setting.engine.refresh()
    generate = setting.fake._generate
    delays = itertools.cycle([0.03, 0.0, 0.02, 0.0, 0.01])

    def late(body: Any) -> Any:
        time.sleep(next(delays))
        return generate(body)

    setting.fake._generate = late  # type: ignore[method-assign]
    wanted = [
        Request(f"s{i}#0", (i % 3, 7), SamplingParams(1.0, 1.0, 0, 8, seed=i // 6, stop_token_ids=(5,)), f"s{i}")
        for i in range(24)
    ]
    expected = {each.request_id: setting.clients[0].sample(each, setting.fake.label) for each in wanted}
    assert len({completion.token_ids for completion in expected.values()}) == 3 * 4
    for each in wanted:
        setting.engine.add(each)
    done = setting.drain()
    assert [completion.request_id for completion in done] != [each.request_id for each in wanted]
    assert {completion.request_id: completion for completion in done} == expected


# ---- several


def test_episodes_are_spread_and_stay_where_they_are(stack: ExitStack, make_model: MakeModel, tmp_path: Path) -> None:
    setting = Setting(stack, make_model(), tmp_path, n=3)
    setting.engine.refresh()
    assert [fake.label for fake in setting.fakes] == [fingerprint(setting.model)] * 3
    for turn in range(3):
        for i in range(6):
            setting.engine.add(
                Request(f"s{i}#{turn}", (i, turn), SamplingParams(1.0, 1.0, 0, 8, 0, (5,)), session=f"s{i}")
            )
        setting.drain()
    for fake in setting.fakes:
        episodes = {prompt[0] for prompt in fake.prompts}
        assert len(episodes) == 2
        assert len(fake.prompts) == 6
    # One of them is started anew: all get the weights again, and none samples from others.
    setting.fakes[1].restart()
    setting.engine.refresh()
    assert [fake.label for fake in setting.fakes] == [fingerprint(setting.model)] * 3


def test_every_server_has_a_rank_and_every_rank_a_server() -> None:
    for n, ranks in itertools.product(range(1, 7), range(1, 7)):
        shares = [share(list(range(n)), rank, ranks) for rank in range(ranks)]
        assert all(shares)
        assert {server for mine in shares for server in mine} == set(range(n))
        if n >= ranks:
            assert sum(map(len, shares)) == n, "none is asked by two"
        # Who answers for a server's weights: each exactly once.
        loads = [mine if rank < n else [] for rank, mine in enumerate(shares)]
        assert sorted(server for mine in loads for server in mine) == list(range(n))


def test_what_fails_on_one_rank_fails_on_all_and_nobody_waits(tmp_path: Path) -> None:
    """Two processes (gloo), each with a server of its own."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.train.server_ranks",
    ]
    subprocess.run([sys.executable, *launcher, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=120)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert [first["mine"], second["mine"]] == first["urls"]
    assert first["first"] == second["first"] == first["unchanged"] == second["unchanged"]
    assert first["first"]["error"] is None
    assert (first["first"]["loads"], len(first["first"]["label"])) == (1, 16)
    anew = "one was started anew"
    assert first[anew] == second[anew] == first["first"] | {"loads": 2}, "all servers get the weights, none is special"
    errors = {name: first[name]["error"] for name in ("one skips a tensor", "no folder", "one is dead")}
    assert errors == {name: second[name]["error"] for name in errors}
    assert f"weight sync: {LAYER_3_V} is not what" in errors["one skips a tensor"]
    assert second["one skips a tensor"]["label"] == UNPROVEN
    assert first["again"]["error"] is None
    assert first["again"]["label"] == second["again"]["label"] != first["first"]["label"]
    assert "SetupError: rollout.sync_folder: /dev/null/sync/" in errors["no folder"]
    assert first["no folder"]["loads"] == first["again"]["loads"]
    assert "broke off" in errors["one is dead"]
    assert first["one is dead"]["label"] != first["fingerprint"]


# ---- what is refused before anything is loaded


def test_addresses_come_from_the_config_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES, "http://n1:8000, http://n2:8000")
    assert server_addresses(RolloutConfig(engine="server")) == ["http://n1:8000", "http://n2:8000"]
    assert server_addresses(RolloutConfig(engine="server", servers=("http://n3:1",))) == ["http://n3:1"]
    with pytest.raises(SetupError, match="n3:1 is no address"):
        server_addresses(RolloutConfig(engine="server", servers=("n3:1",)))
    with pytest.raises(SetupError, match="twice"):
        server_addresses(RolloutConfig(engine="server", servers=("http://n3:1", "http://n3:1")))
    monkeypatch.delenv(ADDRESSES)
    with pytest.raises(SetupError, match=r"needs rollout\.servers"):
        server_addresses(RolloutConfig(engine="server"))


def test_a_server_that_cannot_serve_the_run_is_refused(stack: ExitStack, make_model: MakeModel, tmp_path: Path) -> None:
    fake = FakeVllm(make_model(), VOCABULARY)
    served, _ = stack.enter_context(fake.serving())
    config = make_config(tmp_path, tmp_path, ["rollout.engine=server", f"rollout.servers=[{served.url}]"])
    fake.max_model_len = 8000
    check_rollout_engine(config)
    fake.max_model_len = 7999
    with pytest.raises(SetupError, match=r"start it with --max-model-len 8000"):
        check_rollout_engine(config)
    fake.world_size = 2
    with pytest.raises(SetupError, match="spread over 2 GPUs"):
        check_rollout_engine(config)
    fake.answer = lambda path, body: (404, {"detail": "Not Found"})  # type: ignore[method-assign]
    other = stack.enter_context(fake.serving())[0]
    config = make_config(tmp_path, tmp_path, ["rollout.engine=server", f"rollout.servers=[{other.url}]"])
    with pytest.raises(SetupError, match=r"start it with: python -m shared\.engines\.vllm_server MODEL"):
        check_rollout_engine(config)


def test_a_server_without_our_receiver_is_told_how_to_start(setting: Setting) -> None:
    setting.fake.worker = object()
    client = VllmServer.at(setting.clients[0].address)
    object.__setattr__(client.control, "patience", 0.1)
    with pytest.raises(SetupError, match="describe_weights"):
        client.describe()


def test_the_command_wants_a_model_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["--port", "8000"], None):
        monkeypatch.setattr(sys, "argv", ["vllm_server.py"])
        with pytest.raises(SetupError, match="give the model first"):
            vllm_server.main(arguments)


def test_the_command_adds_what_a_trainer_needs(tmp_path: Path) -> None:
    gpu = server_arguments("M", ["--port", "1"], cpu=False)
    assert gpu[:3] == ["vllm", "serve", "M"]
    assert gpu[-2:] == ["--port", "1"]
    assert gpu[gpu.index("--worker-extension-cls") + 1] == WORKER
    assert {"--enable-scale-out", "--enable-prefix-caching"} <= set(gpu)
    assert "--enforce-eager" not in gpu
    (tmp_path / "config.json").write_text('{"layer_types": ["linear_attention"]}')
    cpu = server_arguments(str(tmp_path), [], cpu=True)
    assert {"--enforce-eager", "--no-enable-chunked-prefill", "--no-enable-prefix-caching"} <= set(cpu)
