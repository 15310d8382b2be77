"""Configs say what they mean, in the file, on the command line and in the environment alike."""

import json
from pathlib import Path

import pytest

from shared.config import StrictModel, build_config, dump_config, load_config, parse_overrides, parse_scalar
from shared.errors import SetupError


class Section(StrictModel):
    learning_rate: float = 1.0
    num_generations: int = 8
    sizes: tuple[int, ...] = (1, 2)
    folder: Path | None = None
    flag: bool = False


class Config(StrictModel):
    section: Section = Section()
    name: str = "x"
    beta: float | None = None


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


ACCEPTED = [
    ("1e-5", 1e-5),
    ('"1e-5"', 1e-5),
    ("1.0e5", 1e5),
    ("1e+5", 1e5),
    ("5e-7", 5e-7),
    (".5", 0.5),
    ("1.", 1.0),
    ("1_000.5", 1000.5),
    ("3", 3.0),
    ("0", 0.0),
    ("-0.0", -0.0),
]


@pytest.mark.parametrize(("text", "value"), ACCEPTED)
def test_a_float_is_read_as_written(tmp_path: Path, text: str, value: float) -> None:
    config = load_config(write(tmp_path, f"section:\n  learning_rate: {text}\n"), Config)
    assert config.section.learning_rate == value
    from_override = load_config(write(tmp_path, "{}"), Config, [f"section.learning_rate={text.strip(chr(34))}"])
    assert from_override == config


@pytest.mark.parametrize("text", ["fast", "nan", ".nan", "inf", "true", "010.5", "12:30", "[1]", "~", "e5", "."])
def test_what_is_no_number_is_refused_with_key_and_value(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError, match=r"section\.learning_rate = "):
        load_config(write(tmp_path, f"section:\n  learning_rate: {text}\n"), Config)


@pytest.mark.parametrize("text", ["8.5", "true", "010", "08", "12:30", "'8'", "8.0", "1e1"])
def test_an_integer_is_an_integer(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError, match=r"section\.num_generations = "):
        load_config(write(tmp_path, f"section:\n  num_generations: {text}\n"), Config)


@pytest.mark.parametrize("text", ["yes", "on", "1", "'true'"])
def test_a_switch_is_true_or_false(tmp_path: Path, text: str) -> None:
    with pytest.raises(SetupError, match=r"section\.flag"):
        load_config(write(tmp_path, f"section:\n  flag: {text}\n"), Config)


def test_unknown_and_repeated_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"unknown key 'section\.lr'; known keys there: .*learning_rate"):
        load_config(write(tmp_path, "section: {lr: 1}\n"), Config)
    with pytest.raises(SetupError, match="'name' is given twice"):
        load_config(write(tmp_path, "name: a\nname: b\n"), Config)
    with pytest.raises(SetupError, match=r"override 'section' is not of the form key=value"):
        load_config(write(tmp_path, "{}"), Config, ["section"])
    with pytest.raises(SetupError, match="does not exist"):
        load_config(tmp_path / "missing.yaml", Config)
    with pytest.raises(SetupError, match="must be a mapping"):
        load_config(write(tmp_path, "- 1\n"), Config)
    with pytest.raises(SetupError, match=r"line \d"):
        load_config(write(tmp_path, "a: [1\n"), Config)


def test_the_environment_comes_before_the_command_line() -> None:
    environ = {"EXECPLAN__section__learning_rate": "1e-3", "HOME": "/"}
    assert parse_overrides([], environ) == {"section.learning_rate": 1e-3}
    assert parse_overrides(["section.learning_rate=2e-3"], environ) == {"section.learning_rate": 2e-3}


@pytest.mark.parametrize("name", ["1e5", "true", "~", "010", "a: b", "", "null", "- x", "#", "é\n", "8"])
def test_a_dumped_config_reads_back_equal(tmp_path: Path, name: str) -> None:
    config = build_config(
        {"name": name, "section": {"sizes": [3], "folder": "a/b", "learning_rate": 1e-5}}, Config, "t"
    )
    assert config.name == name
    assert load_config(write(tmp_path, dump_config(config)), Config) == config


def test_scalars_follow_the_core_schema_of_yaml_12() -> None:
    cases = json.loads('[["1e-5", 1e-05], ["010", "010"], ["12:30", "12:30"], ["on", "on"], ["true", true], ["8", 8]]')
    for text, value in cases:
        assert parse_scalar(text) == value
        assert type(parse_scalar(text)) is type(value)
