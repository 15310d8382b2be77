"""Load the tokenizer of a model folder: transformers without torch. Local files only."""

from pathlib import Path
from typing import Any

from shared.errors import SetupError


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. SetupError when it, or transformers, cannot be loaded."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SetupError(f"a model's tokenizer needs transformers ({error}): pip install 'execplan[eval]'") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise SetupError(f"the tokenizer in {folder} cannot be loaded: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
