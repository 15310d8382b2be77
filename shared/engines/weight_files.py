"""What can be seen of a model folder's weight files without reading the weights."""

from pathlib import Path

from shared.errors import SetupError


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name in a safetensors file. SetupError when it is cut, or is no such file: its header is checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise SetupError(f"{path} is damaged ({error}): copy or download it again, or take another model") from None


def refuse_damaged(folder: Path) -> None:
    """SetupError naming a safetensors file of `folder` that is cut or is none."""
    for path in sorted(folder.glob("*.safetensors")):
        tensor_shapes(path)
