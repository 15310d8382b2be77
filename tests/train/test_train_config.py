"""Every shipped config says what the recipe's table says; bad values are refused before anything loads."""

from pathlib import Path

import pytest

from shared.config import build_config, dump_config, load_config, load_yaml
from shared.errors import SetupError
from train.config import TrainConfig, load_train_config

CONFIGS = Path(__file__).parents[2] / "configs"
GRPO = sorted(CONFIGS.glob("grpo_*.yaml"))


def test_the_four_runs_ship() -> None:
    assert [path.stem for path in GRPO] == ["grpo_bird", "grpo_curriculum", "grpo_sqale", "grpo_synsql"]


@pytest.mark.parametrize("path", GRPO, ids=lambda path: path.stem)
def test_every_config_holds_the_numbers_of_the_table(path: Path) -> None:
    config = load_config(path, TrainConfig)
    curriculum = path.stem == "grpo_curriculum"
    assert config.model.path == ("cwolff/qwen3.5-2b-grpo-sqale" if curriculum else "Qwen/Qwen3.5-2B")
    assert config.rollout.max_tokens == (24_576 if curriculum else 12_288)
    assert config.curriculum.enabled is curriculum
    assert (config.curriculum.ramp_steps, config.curriculum.k) == (400, 2.0)
    assert (config.rollout.questions, config.rollout.candidates) == (18, 8)
    assert (config.rollout.max_turns, config.rollout.max_new_tokens, config.rollout.max_failed_queries) == (6, 2048, 4)
    assert config.rollout.explore_share == 1.0
    assert (config.rollout.engine, config.rollout.vllm.sleep) == ("vllm", True)
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (1.0, 1.0, 0)
    assert (config.optimizer.lr, config.optimizer.schedule, config.optimizer.warmup_share) == (1e-5, "cosine", 0.05)
    assert (config.loss.token_constant, config.loss.inner_epochs) == (1024.0, 1)
    assert (config.loss.ratio, config.loss.clip_low, config.loss.clip_high) == ("sequence", 0.2, 0.28)
    assert (config.loss.kl.mode, config.loss.kl.target) == ("adaptive", 0.005)
    assert (config.reward.exact, config.reward.partial, config.reward.partial_over) == (3.0, 0.9, "rows")
    assert (config.reward.join_bonus, config.reward.majority_bonus) == (0.1, 0.1)
    assert (config.validation.every, config.validation.name) == (50, "BIRD dev")
    assert config.validation.modes == ("withheld", "full")
    assert (config.validation.temperature, config.validation.top_p, config.validation.top_k) == (0.6, 0.95, 20)
    assert (config.reward.gate_bonuses, config.reward.group_filter) == (False, "reward")
    if path.stem in ("grpo_sqale", "grpo_synsql"):
        assert config.data.difficulties == ("simple", "moderate")
    if curriculum:
        assert config.steps == 1000
        assert config.data.difficulties == ("simple", "moderate", "hard")
    else:
        assert 1350 <= config.steps <= 1650


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_training_config_reloads_to_the_same_object(path: Path, tmp_path: Path) -> None:
    if "rollout" not in load_yaml(path):
        pytest.skip("not a GRPO config")
    config = load_config(path, TrainConfig)
    (tmp_path / "copy.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "copy.yaml", TrainConfig) == config


MINIMAL = "output: runs/x\nmodel: {path: owner/name}\ndata: {benchmark: toy}\n"

NUMBERS = [
    ("optimizer.lr=1e-5", "optimizer.lr", 1e-5),
    ('optimizer.lr="1e-5"', "optimizer.lr", 1e-5),
    ("loss.kl.target=1E-3", "loss.kl.target", 1e-3),
    ("loss.token_constant=1.0e5", "loss.token_constant", 1e5),
    ("loss.token_constant=1024", "loss.token_constant", 1024.0),
    ("steps=7", "steps", 7),
]


def _get(config: object, key: str) -> object:
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("override", "key", "value"), NUMBERS)
@pytest.mark.parametrize("where", ["file", "override", "environment"])
def test_numbers_are_numbers_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, override: str, key: str, value: object
) -> None:
    path = tmp_path / "c.yaml"
    text = override.partition("=")[2]
    path.write_text(MINIMAL)
    overrides = []
    if where == "file":
        nested = "".join(f"{'  ' * i}{part}:\n" for i, part in enumerate(key.split(".")[:-1]))
        path.write_text(f"{MINIMAL}{nested}{'  ' * key.count('.')}{key.split('.')[-1]}: {text}\n")
    elif where == "override":
        overrides = [f"{key}={text.strip(chr(34))}"]
    else:
        monkeypatch.setenv("EXECPLAN__" + key.replace(".", "__"), text.strip('"'))
    found = _get(load_train_config(path, overrides), key)
    assert found == value
    assert type(found) is type(value)


REFUSED = [
    ("optimizer.lr=fast", "optimizer.lr"),
    ("optimizer.lr=0", "optimizer.lr"),
    ("rollout.candidates=8.5", "rollout.candidates"),
    ("rollout.candidates=true", "rollout.candidates"),
    ("rollout.candidates=1", "rollout.candidates"),
    ("steps=010", "steps"),
    ("loss.kl.coefficient=nan", "loss.kl.coefficient"),
    ("rollout.query_seconds=12:30", "rollout.query_seconds"),
    ("rollout.explore_share=1.5", "rollout.explore_share"),
    ("loss.klx.target=1", "klx"),
    ("learning_rate=1", "learning_rate"),
    ("data.benchmark=spider3", "data.benchmark"),
    ("data.benchmark=questions", "data.questions"),
    ("data.benchmark=sqale", "data.queries"),
    ("data.questions=mine.json", "benchmark 'toy' does not read data.questions"),
    ("data.queries=owner/name", "benchmark 'toy' does not read data.queries"),
    ("rollout.top_p=0.95", "top_p"),
    ("rollout.top_k=20", "top_k"),
    ("rollout.temperature=0.7", "temperature"),
    ("rollout.max_new_tokens=30000", "max_new_tokens"),
    ("reward.partial=2.95", "exact"),
    ("validation.every=50", "validation.questions"),
    ("validation.modes=[full, full]", "validation.modes"),
    ("validation.modes=[]", "validation.modes"),
    ("validation.modes=[both]", "validation.modes"),
]


@pytest.mark.parametrize(("override", "named"), REFUSED, ids=[item for item, _ in REFUSED])
def test_bad_values_name_the_key(tmp_path: Path, override: str, named: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    with pytest.raises(SetupError, match=named) as error:
        load_train_config(path, [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", ["loss.kl.offload=true", "optimizer.name=muon", "optimizer.name=adamw8bit"])
def test_sharding_refuses_what_it_cannot_do(tmp_path: Path, other: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    assert load_train_config(path, ["parallel=fsdp"]).parallel == "fsdp"
    with pytest.raises(SetupError, match=other.partition("=")[0]):
        load_train_config(path, ["parallel=fsdp", other])


def test_other_sampling_is_allowed_without_the_ratio(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL)
    config = load_train_config(path, ["loss.ratio=none", "rollout.temperature=0.7", "rollout.top_p=0.95"])
    assert config.rollout.temperature == 0.7


def test_missing_data_is_named(tmp_path: Path) -> None:
    data = {"benchmark": "questions", "questions": str(tmp_path / "no.json"), "databases": str(tmp_path)}
    path = tmp_path / "c.yaml"
    path.write_text(
        dump_config(build_config({"output": "x", "model": {"path": "a/b"}, "data": data}, TrainConfig, "t"))
    )
    with pytest.raises(SetupError, match=r"data\.questions.*no\.json does not exist"):
        load_train_config(path)


def test_a_missing_validation_set_is_named_and_only_asked_for_when_used(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{MINIMAL}validation: {{every: 5, questions: {tmp_path}/dev.json, databases: {tmp_path}}}\n")
    with pytest.raises(SetupError, match=r"validation\.questions.*dev\.json does not exist"):
        load_train_config(path)
    assert load_train_config(path, ["validation.every=0"]).validation.every == 0


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(MINIMAL + "seed: 1\nseed: 2\n")
    with pytest.raises(SetupError, match="seed"):
        load_train_config(path)
