"""Whether the export's chat template lets the model think, as it was trained to: asked of the template itself."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shared.chat import THINK
from shared.engines.tokenizer import first_line
from shared.errors import SetupError
from train.export.aux_files import CHAT_TEMPLATE


def thinking(folder: Path) -> dict[str, bool]:
    """Whether a reply starts inside a think block: `asked` with enable_thinking=True, and `by_default` without it.

    Raises SetupError for a template that fails on a system prompt and a question.
    """
    path = folder / CHAT_TEMPLATE
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(folder / "tokenizer.json")),
        chat_template=path.read_text(encoding="utf-8"),
    )
    start = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    def opens(**more: Any) -> bool:
        text = tokenizer.apply_chat_template(start, tokenize=False, add_generation_prompt=True, **more)
        return bool(text.rstrip().endswith(THINK))

    try:
        return {"asked": opens(enable_thinking=True), "by_default": opens()}
    except Exception as error:  # templates raise what they like
        raise SetupError(
            f"{path} fails on a system prompt and a question ({first_line(error)}); copy the base's own template there"
        ) from None


def thinking_note(found: dict[str, bool]) -> str | None:
    """What whoever serves the export should know about it; None when thinking is on by itself."""
    if not found["asked"]:
        return f"the chat template never opens a {THINK} block, whether asked to or not"
    if not found["by_default"]:
        return "thinking is off unless a request asks for it: send chat_template_kwargs {'enable_thinking': true}"
    return None
