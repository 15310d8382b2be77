"""A module of this project and everything of the project that it imports, as one Python file that stands alone.

The file holds the sources as they are, readable, and an importer for them (train/export/embedded.py). So the agent of
an export is the code of its training and evaluation, not a copy that drifts.
"""

import ast
import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from train.export import embedded

ROOT = Path(__file__).resolve().parents[2]
_QUOTE = "'''"

_PROGRAM = '''\
#!/usr/bin/env python3
"""{doc}
Made by execplan {version}; do not edit: the sources of the project stand below as they are. Needs Python 3.11 or newer.
{facts}"""

{importer}

SOURCES = {{}}
{sources}
install(SOURCES, __file__)

if __name__ == "__main__":
    from pathlib import Path

    from shared.cli import run_main
    from shared.sql.worker import WORKER_FLAG
    from shared.sql.worker import main as serve_sql

    if sys.argv[1:] == [WORKER_FLAG]:  # started by the process that runs the program, for the SQL of a model
        serve_sql()
    else:
        from {main} import main

        run_main(lambda: main(home=Path(__file__).absolute().parent))
'''


def one_file(main: str, facts: Mapping[str, str], root: Path = ROOT) -> str:
    """The program that runs `main` (a module with `main(argv, home)`), as text. `facts` go into its head, a line each.

    `home` is the folder that the file lies in.
    """
    sources = closure(main, root)
    texts = {path: (root / path).read_text(encoding="utf-8") for path in sources}
    digest = hashlib.sha256()
    for path, text in texts.items():
        if _QUOTE in text:
            raise ValueError(f"{path} holds {_QUOTE}, in which it is to be quoted")
        digest.update(f"{path}\0{text}\0".encode())
    doc = ast.get_docstring(ast.parse(texts[_path(main, root)]), clean=False) or ""
    lines = [*facts.items(), ("sources", f"{len(texts)} files, sha256 {digest.hexdigest()}")]
    return _PROGRAM.format(
        doc=doc,
        version=tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"],
        facts="".join(f"{name}: {value}\n" for name, value in lines),
        importer=_importer(),
        sources="".join(f'SOURCES["{path}"] = r{_QUOTE}{text}{_QUOTE}\n' for path, text in texts.items()),
        main=main,
    )


def closure(main: str, root: Path = ROOT) -> list[str]:
    """The files of the project, as paths below `root`, that `main` may import: lazily, and for type checking, too."""
    found: set[str] = set()
    waiting = [_path(main, root)]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        folder = Path(path).parent
        waiting += [str(parent / "__init__.py") for parent in (folder, *folder.parents) if parent.name]
        waiting += [file for name in _imports(root / path) if (file := _path(name, root))]
    return sorted(found)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path} imports by a relative name")
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _path(module: str, root: Path) -> str:
    """The file of a module of the project, "" for any other name."""
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if (root / path).is_file():
            return path
    return ""


def _importer() -> str:
    """The text of the importer, without its docstring."""
    text = Path(embedded.__file__).read_text(encoding="utf-8")
    doc = ast.parse(text).body[0]
    assert doc.end_lineno is not None
    return "\n".join(text.splitlines()[doc.end_lineno :]).strip()
