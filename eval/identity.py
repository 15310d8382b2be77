"""What makes two runs the same run: everything that determines the result, and nothing else.

Not part of it: how many episodes and SQL workers run at once, where files lie, and whether golds came from a cache.
"""

import hashlib
import platform
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from eval.config import EvalConfig
from eval.engines import Prepared
from eval.gold import exclusion_rule
from shared.data.example import Example
from shared.tools.executor import ToolLimits
from shared.tools.protocol import PROMPT_SHA256

_ROOT = Path(__file__).resolve().parents[1]
# The code that an episode and its verdict go through. Reports, statistics and progress bars may change.
_CODE = (
    "shared/**/*.py",
    "eval/scorers/*.py",
    "eval/gold*.py",
    "eval/tablebook.py",
    "eval/sqltext.py",
    "eval/judge.py",
)


def question_seed(seed: int, question_id: str, sample: int = 0) -> int:
    """The seed of one episode: depends on the run's seed and the question, not on its place in the file."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{question_id}/{sample}".encode()).digest()[:6], "big")


def data_sha256(benchmark: str, examples: Sequence[Example]) -> str:
    """Identity of what was asked of what: questions, evidence, golds, and the content of the databases."""
    digest = hashlib.sha256(benchmark.encode())
    for e in sorted(examples, key=lambda e: e.question_id):
        fields = (e.question_id, e.db_id, e.question, e.evidence, e.gold_sql, e.database.content_hash)
        tables = (e.meta["gold_sha256"],) if "gold_sha256" in e.meta else ()
        for text in (*fields, *tables):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def run_identity(config: EvalConfig, benchmark: str, examples: Sequence[Example], prepared: Prepared) -> dict[str, Any]:
    """Everything that determines a run's result. A run resumes only where all of it is unchanged."""
    budgets = asdict(config.episode())
    for key in ("mode", "sampling"):
        del budgets[key]
    sampling = config.sampling()
    return {
        "engine": config.engine,
        **({"engine_settings": dict(prepared.settings)} if prepared.settings else {}),
        "model": config.model,
        "model_sha256": prepared.sha256,
        "benchmark": benchmark,
        "subset": config.subset,
        "questions": len(examples),
        "samples": config.sample_count(),
        "data_sha256": data_sha256(benchmark, examples),
        "mode": config.mode,
        "seed": config.seed,
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
        "budgets": budgets,
        "tool_limits": asdict(ToolLimits()),
        "limits": {"query_seconds": config.query_seconds, "gold_seconds": config.gold_seconds},
        "dtype": config.dtype,
        "prompt_sha256": PROMPT_SHA256,
        "template_sha256": prepared.codec.template_sha256,
        "gold_audit": config.audit,
        "exclusion_rule": exclusion_rule(config.exclude),
        "versions": {**own_versions(), **prepared.versions},
    }


def own_versions() -> dict[str, str]:
    """Of this program, its code (see `_CODE`), Python and SQLite."""
    try:
        own = version("execplan")
    except PackageNotFoundError:
        own = "source"
    return {
        "execplan": own,
        "code": code_sha256()[:16],
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


@cache
def code_sha256() -> str:
    """Identity of the code that results depend on, this program's own (see `_CODE`)."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _CODE for path in _ROOT.glob(pattern)}):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()
