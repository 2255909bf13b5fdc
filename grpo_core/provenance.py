"""Which code made a result: a fingerprint of the source files that decide its numbers, written beside them.

Comments, docstrings and blank lines do not count, and neither does processes.py: all results in outputs/ were made by single
processes, where each of its functions returns what it was given. A test compares the fingerprints in outputs/ with the present
code, so that no result there is older than what claims to have made it.
"""

import ast
import hashlib
import importlib.util
import io
import tokenize
from pathlib import Path


def code_version(*modules: str) -> str:
    """A fingerprint, 12 hex digits, of some modules of this package and of all its modules that they import.

    >>> code_version("grpo_core.kl") == code_version("grpo_core.kl", "grpo_core.kl")
    True
    """
    digest = hashlib.sha256()
    for module in sorted(_with_imports(modules)):
        digest.update(f"{module}\n{bare_source(_source(module))}\n".encode())
    return digest.hexdigest()[:12]


def start_policies() -> dict[str, str]:
    """A fingerprint of each shipped file of weights: results depend on them, too."""
    files = sorted((Path(__file__).parent / "data").glob("*.pt"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def bare_source(text: str) -> str:
    """Python source without comments, docstrings, blank lines and trailing spaces.

    >>> bare_source('x = 1  # one')
    'x = 1'
    """
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _source(module: str) -> str:
    return Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")


def _with_imports(modules) -> set[str]:
    """The modules and all modules of the package that they import, directly or not."""
    found, waiting = set(), list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found and module != "grpo_core.processes":
            found.add(module)
            nodes = [node for node in ast.walk(ast.parse(_source(module))) if isinstance(node, ast.ImportFrom) and node.module]
            names = {node.module for node in nodes} | {f"{node.module}.{name.name}" for node in nodes for name in node.names}
            waiting += [name for name in names if name.startswith("grpo_core.") and _is_module(name)]
    return found


def _is_module(name: str) -> bool:
    """Of `from a import b`, b may be a module or something in it."""
    parent = importlib.util.find_spec(name.rpartition(".")[0])
    return parent.submodule_search_locations is not None and importlib.util.find_spec(name) is not None
