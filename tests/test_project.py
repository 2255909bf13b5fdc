"""The project keeps its promises: packages, architecture, docstrings, short functions, style, links, commands."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import grpo_core
from grpo_core.__main__ import Run, WarmStart

ROOT = Path(__file__).parents[1]
CORE = ROOT / "grpo_core"

# The architecture. A module imports only from rows above its own; imports point one way.
ARCHITECTURE = [
    ["task", "policy", "checkpoint", "provenance", "processes"],
    ["rollout"],
    ["advantages", "kl", "evaluate"],
    ["surrogate", "history"],
    ["config"],
    ["grpo"],
    ["report", "warm_start"],
    ["shell_game", "sloppy_grader", "leash"],
    ["__main__"],
]
BUILT_ON_THE_CORE = ("grpo_core.bridge", "grpo_core.rivals", "grpo_core.studies", "grpo_core.lab")
OF_REAL = ["model", "data", "instruction", "lora_rank"]  # Settings of `real`, which README and notebook 9 name.
OF_HUGGING_FACE = ("transformers", "trl", "datasets", "accelerate", "peft", "math_verify")
ROW = {module: row for row, modules in enumerate(ARCHITECTURE) for module in modules}


# Packages


def requirements():
    """({name: bounds}, bounds on Python) of pyproject.toml, with all that "make test" installs."""
    requirement = pytest.importorskip("packaging.requirements").Requirement
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    parsed = map(requirement, project["dependencies"] + extras["notebooks"] + extras["test"])
    return {one.name: one.specifier for one in parsed}, requirement("python" + project["requires-python"]).specifier


def test_conda_environment_is_what_pyproject_asks_for():
    yaml = pytest.importorskip("yaml", reason="PyYAML is an extra: pip install -e .[test]")
    requirement = importlib.import_module("packaging.requirements").Requirement
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == "grpo-from-scratch"
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *packages, pip, pip_block = environment["dependencies"]
    assert pip == "pip" and pip_block == {"pip": ["-e ."]}, "conda complains about a pip block without pip before it"

    on_pypi = {"pytorch-cpu": "torch", "matplotlib-base": "matplotlib"}
    bounds = {on_pypi.get(one.name, one.name): one.specifier for one in map(requirement, packages)}
    packages, python = requirements()
    assert bounds == packages | {"python": python}


def test_bounds_hold_here():
    """Bounds that the tested environment itself breaks would be dishonest."""
    from importlib.metadata import version

    packages, python = requirements()
    assert python.contains(".".join(map(str, sys.version_info[:3])))
    for name, bound in packages.items():
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            assert bound.contains(version(name), prereleases=True), name


# Architecture


def imports(path):
    """Full names of what a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from (f"{name}.{part.name}" for part in node.names) if name == "grpo_core" else [name]


def modules_of_core():
    return sorted(path.stem for path in CORE.glob("*.py") if path.stem != "__init__")


def test_each_module_has_its_place():
    assert modules_of_core() == sorted(ROW)


@pytest.mark.parametrize("module", modules_of_core())
def test_imports_point_one_way(module):
    for name in imports(CORE / f"{module}.py"):
        assert not name.startswith("."), f"{module} imports {name}: write the full name"
        package, _, rest = name.partition(".")
        if package == "grpo_core":
            assert rest in ROW, f"{module} imports {name}, which is no module of the core"
            assert ROW[rest] < ROW[module], f"{module} imports {name}, which stands to the right of it"


def test_the_core_stands_without_what_is_built_on_it():
    inside = [name for module in modules_of_core() for name in imports(CORE / f"{module}.py")]
    inside += imports(CORE / "__init__.py")
    heavy = ("ipywidgets", "IPython", *OF_HUGGING_FACE, "matplotlib.pyplot")
    assert [name for name in inside if name.startswith((*BUILT_ON_THE_CORE, *heavy))] == []


@pytest.mark.parametrize("package", BUILT_ON_THE_CORE)
def test_what_is_built_on_the_core_points_one_way_too(package):
    """bridge → rivals → studies → lab: each imports the core, and what stands to the left of it."""
    right_of_it = BUILT_ON_THE_CORE[BUILT_ON_THE_CORE.index(package) + 1 :]
    names = {name for path in (CORE / package.split(".")[1]).rglob("*.py") for name in imports(path)}
    assert [name for name in names if name.startswith(("grpo_core.__main__", *right_of_it))] == []


def test_import_changes_nothing_in_the_process():
    program = """if True:
        import json, random, sys
        import numpy, torch

        def state():
            return torch.get_num_threads(), torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

        before = state()
        import grpo_core
        heavy = ["matplotlib.pyplot", "transformers", "trl", "peft", "datasets", "ipywidgets", "IPython", "tyro"]
        print(json.dumps([state() == before, sorted(set(heavy) & set(sys.modules))]))
    """
    run = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:grpo_core", "-c", program], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    same, heavy = json.loads(run.stdout)
    assert same, "the number of threads or a global generator has changed"
    assert heavy == []


# Code


@pytest.mark.parametrize("name", grpo_core.__all__)
def test_public_names_explain_themselves(name):
    text = getattr(grpo_core, name).__doc__ or ""
    assert len(text.split()) >= 4 and not text.startswith(f"{name}("), "a dataclass without a docstring gets its signature"


def test_public_names_are_those_that_are_imported():
    tree = ast.parse((CORE / "__init__.py").read_text(encoding="utf-8"))
    imported = [name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(grpo_core.__all__) == sorted(imported)


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_each_file_opens_with_its_idea(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def functions(path):
    """(name, lines of code) of each function: its docstring, blank lines and lines of comment do not count."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = range(first.lineno, first.end_lineno + 1) if ast.get_docstring(node) else range(0)
            code = [i for i in range(node.lineno, node.end_lineno + 1) if i not in docstring]
            yield node.name, sum(bool(lines[i - 1].strip()) and not lines[i - 1].strip().startswith("#") for i in code)


def test_lines_of_code_are_counted_right(tmp_path):
    (tmp_path / "one.py").write_text('def f(\n    x,\n):\n    """Two\n    lines."""\n\n    # why\n    return x  # what\n')
    assert list(functions(tmp_path / "one.py")) == [("f", 4)]


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_functions_are_short(path):
    assert {name: length for name, length in functions(path) if length > 40} == {}, "aim for 30"


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=" ".join)
def test_style(command):
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed: pip install -e .[test]")
    run = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


# Words


def anchors(path):
    """Anchors of a Markdown file's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ +(.*)$", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def pages():
    return {path.name: path for path in sorted(ROOT.glob("*.md"))}


def test_there_is_a_readme():
    assert "README.md" in pages()


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
    text = pages()[page].read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    for link in links:
        if not re.match(r"[a-z]+:", link):
            file, _, anchor = link.partition("#")
            target = ROOT / file if file else pages()[page]
            assert target.exists(), f"{page} links to {link}"
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{page} links to {link}"


def code_in(text):
    """Lines of fenced blocks, and what stands in backticks."""
    blocks = re.findall(r"(?ms)^ *```\w*\n(.*?)^ *```", text)
    rest = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    return [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`]+)`", rest)


@pytest.mark.parametrize("page", pages())
def test_commands_exist(page):
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    settings = [field.name for kind in (grpo_core.GRPOConfig, Run, WarmStart) for field in fields(kind)] + OF_REAL
    flags = {"--help", "--nproc-per-node", *("--" + name.replace("_", "-") for name in settings)}
    for code in code_in(pages()[page].read_text(encoding="utf-8")):
        code = code.split(" #")[0]
        for target in re.findall(r"\bmake ([a-z-]+)", code):
            assert target in targets, f"{page}: {code}"
        if "python -m grpo_core" in code:
            assert set(re.findall(r"--[a-z-]+", code)) <= flags, f"{page}: {code}"


def test_code_is_found_in_text():
    text = "Say `make one` or\n\n```bash\nmake two  # and\npython -m grpo_core --beta 1\n```\nmake three"
    assert code_in(text) == ["make two  # and", "python -m grpo_core --beta 1", "make one"]
