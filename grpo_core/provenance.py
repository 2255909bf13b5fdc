"""Which code made a result: a fingerprint of the source files that decide its numbers, written beside them.

Comments, docstrings and blank lines do not count. A test compares the fingerprints in outputs/ with the present code, so that
no result there is older than what claims to have made it.
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
        if module not in found:
            found.add(module)
            nodes = ast.walk(ast.parse(_source(module)))
            imported = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
            waiting += [name for name in imported if name.startswith("grpo_core.")]
    return found
