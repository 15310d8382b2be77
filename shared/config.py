"""Typed configs from YAML: what a file says is what the run gets, or it is refused before anything loads.

YAML 1.1 reads `1e-5` as text, `010` as 8, `12:30` as 750 and `on` as true, and lets a repeated key win
silently. Here a plain scalar is a number only when it is written as one in YAML 1.2's core schema
(decimal, no leading zero), booleans are `true` and `false` alone, and a repeated key is an error.
"""

import json
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import SetupError

Model = TypeVar("Model", bound=BaseModel)

ENV_PREFIX = "EXECPLAN__"

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


class StrictModel(BaseModel):
    """Base of every config section: unknown keys, wrong types, NaN and infinity are refused; frozen once built."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 core scalars and unique keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own class attribute)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text which `parse_scalar` would read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if parse_scalar(text) == text else "'")


_Dumper.add_representer(str, _Dumper.represent_text)


def _is_float(text: str) -> bool:
    return _FLOAT.fullmatch(text) is not None and _INT.fullmatch(text) is None


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style is not None:
        return text
    return parse_scalar(text)


def parse_scalar(text: str) -> Any:
    """A plain scalar as YAML 1.2 reads it: int, float, bool, None, or the text itself.

    >>> [parse_scalar(s) for s in ("1e-5", "010", "12:30", "on", "true", "8", "1.0e5", "~")]
    [1e-05, '010', '12:30', 'on', True, 8, 100000.0, None]
    """
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _is_float(text):
        return float(text.replace("_", ""))
    return text


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    result: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' is given twice", key_node.start_mark)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_Loader.add_constructor("tag:yaml.org,2002:str", _construct_scalar)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. SetupError when it is missing, not YAML, not a mapping, or repeats a key."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SetupError(f"config {path} does not exist; see configs/ for the ones that ship") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"config {path} cannot be read: {error}") from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise SetupError(f"config {path}{where}: {getattr(error, 'problem', None) or error}; mend the file") from None
    if not isinstance(data, dict):
        raise SetupError(f"config {path} must be a mapping of keys to values")
    return data


def _merge(base: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        base = base.setdefault(parent, {})
        if not isinstance(base, dict):
            raise SetupError(f"override {key}: '{parent}' is not a section")
    base[last] = value


def parse_overrides(items: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """`key.sub=value` items, preceded by environment variables `EXECPLAN__key__sub=value`, as flat dotted keys."""
    result = {
        name[len(ENV_PREFIX) :].replace("__", "."): parse_scalar(value)
        for name, value in sorted(environ.items())
        if name.startswith(ENV_PREFIX)
    }
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise SetupError(f"override '{item}' is not of the form key=value")
        if value[:1] in "[{":
            try:
                result[key] = yaml.load(value, Loader=_Loader)
            except yaml.YAMLError as error:
                raise SetupError(f"override {key}: {value} is not a YAML list or mapping ({error})") from None
        else:
            result[key] = parse_scalar(value)
    return result


def load_config(path: Path, model: type[Model], overrides: Iterable[str] = ()) -> Model:
    """The config in `path`, overridden by the environment and then by `overrides`, checked against `model`.

    Raises SetupError with key, value and expected type for the first thing wrong.
    """
    data = load_yaml(path)
    for key, value in parse_overrides(overrides).items():
        _merge(data, key, value)
    return build_config(data, model, str(path))


def build_config(data: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """Validate `data` against `model`; `source` names it in the error."""
    try:
        # JSON mode: still strict about types, but a list may fill a tuple and text a path.
        return model.model_validate_json(json.dumps(_quoted_floats(data, model)))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top level)"
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(_known_keys(model, first["loc"])))
            raise SetupError(f"{source}: unknown key '{key}'; known keys there: {known}") from None
        if first["type"] == "missing":
            raise SetupError(f"{source}: key '{key}' is missing") from None
        raise SetupError(f"{source}: {key} = {first['input']!r}: {first['msg']}") from None


def _submodel(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = model.model_fields.get(key)
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _quoted_floats(data: Any, model: type[BaseModel]) -> Any:
    """A float key takes a quoted number ("1e-5") as that number; nothing else is converted."""
    if not isinstance(data, Mapping):
        return data
    result = dict(data)
    for key, value in data.items():
        field = model.model_fields.get(key)
        if (section := _submodel(model, key)) is not None:
            result[key] = _quoted_floats(value, section)
        elif field is not None and field.annotation in (float, float | None) and isinstance(value, str):
            result[key] = float(value) if _is_float(value) else value
    return result


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location[:-1]:
        section = _submodel(model, str(part))
        if section is None:
            return []
        model = section
    return list(model.model_fields)


def dump_config(config: BaseModel) -> str:
    """YAML that `load_config` reads back to an equal object."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
