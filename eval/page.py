"""A report as one HTML file that needs nothing beside itself: style, script, plots and episodes are inside.

What models and databases wrote reaches the page in two ways only. Text in tables goes through jinja2's autoescape.
Episodes are JSON in script elements of a type that no browser runs, each parsed when it is opened, and put on the
page as text nodes. The content security policy lets the one script of this page run, by its hash, and nothing else.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from eval.content import Content
from eval.gold import RULES
from eval.tables import Table
from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS, PROMPT_SHA256

_NOT_IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
_TALL = 20  # rows of a table that are shown before one asks for the rest, as the style sheet has it


def embed_json(data: Any) -> str:
    """JSON that is safe inside a script element: ASCII, without `<`, `>` and `&`, the same value when parsed.

    >>> embed_json({"a": "</script> & \\u2028"})
    '{"a":"\\\\u003c/script\\\\u003e \\\\u0026 \\\\u2028"}'
    """
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).translate(_NOT_IN_SCRIPT)


def render_page(content: Content) -> Iterator[str]:
    """The page, piece by piece: a run's episodes are many times the rest."""
    template = _environment().get_template("report.html.j2")
    style, script = _read("report.css"), "\n".join(_read(name) for name in ("dom.js", "trace.js", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    viewer = content.viewer
    settings = {
        "kind": viewer.kind,
        "runs": content.runs,
        "classes": viewer.classes,
        "tiers": viewer.tiers,
        "flags": {rule.key: rule.doc for rule in RULES.values()},
        "modes": [identity["mode"] for identity in content.identities],
    }
    prompts = {identity["prompt_sha256"] for identity in content.identities}
    return template.generate(
        content=content,
        style=Markup(style),
        script=Markup(script),
        script_hash=digest,
        settings=Markup(embed_json(settings)),
        index=Markup(embed_json([viewer.entry(records) for records in content.episodes])),
        traces=_traces(content),
        prompt=EXEC_PLAN_TOOL_INSTRUCTIONS if prompts == {PROMPT_SHA256} else None,
        identities=[json.dumps(identity, indent=2, ensure_ascii=True) for identity in content.identities],
        is_tall=_is_tall,
        svg=Markup,
        filters=embed_json,
    )


def _traces(content: Content) -> Iterator[Markup]:
    limits = [int(identity["budgets"]["max_turns"]) for identity in content.identities]
    for records in content.episodes:
        sides = [content.viewer.trace(record, limit) for record, limit in zip(records, limits, strict=True)]
        yield Markup(embed_json(sides))


def _is_tall(table: Table) -> bool:
    return len(table.rows) > _TALL + 4


def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(_read), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _read(name: str) -> str:
    return (resources.files("eval") / "templates" / name).read_text(encoding="utf-8")
