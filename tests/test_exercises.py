"""The exercises: the right answer passes, each likely mistake is called by its name, each published solution works."""

import ast
import contextlib
import importlib
import io
import pkgutil
import re
from pathlib import Path

import nbformat
import pytest
import torch

import grpo_core.lab.exercises
from grpo_core.lab.checks import Exercise

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9][0-9]_*.ipynb"))
FILES = [file.name for file in pkgutil.iter_modules(grpo_core.lab.exercises.__path__)]


def exercises():
    """All Exercises, one file after the other."""
    for file in FILES:
        module = importlib.import_module(f"grpo_core.lab.exercises.{file}")
        for name, value in vars(module).items():
            if isinstance(value, Exercise):
                yield pytest.param(value, id=f"{file}.{name}")


EXERCISES = list(exercises())
each_exercise = pytest.mark.parametrize("exercise", EXERCISES)
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_exercise
def test_right_answer_passes(exercise):
    assert exercise(exercise.right) == f"Right, on {len(exercise.inputs)} hidden inputs."


@each_exercise
def test_each_mistake_is_called_by_its_own_name_and_no_other(exercise):
    messages = [mistake.message for mistake in exercise.mistakes]
    assert len(set(messages)) == len(messages) >= 4
    for mistake in exercise.mistakes:
        assert exercise(mistake.wrong) == f"Not quite: {mistake.message}"


@each_exercise
def test_stub_is_told_not_yet(exercise):
    assert exercise(lambda *arguments: ...).startswith("Not yet")
    assert exercise(lambda *arguments: None).startswith("Not yet")


@each_exercise
def test_whatever_an_attempt_raises_is_shown(exercise):
    def attempt(*arguments):
        raise KeyError("oops")

    assert "KeyError: 'oops'" in exercise(attempt)


@each_exercise
@pytest.mark.parametrize("answer", ["72;", {}, [[]], float("nan"), object, (1, "a"), -123.0], ids=repr)
def test_nonsense_is_not_right(exercise, answer):
    assert exercise(lambda *arguments: answer).startswith("Not quite: ")


@each_exercise
def test_an_attempt_cannot_spoil_the_hidden_inputs(exercise):
    """Work in place changes neither the truth nor the next try."""

    def attempt(*arguments):
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                argument.detach().zero_()
        return 0.0

    assert exercise(attempt).startswith("Not quite")
    assert exercise(exercise.right).startswith("Right")


def published(path):
    """The exercises of a notebook: (name of the function, cell with the stub, solution)."""
    notebook = nbformat.read(path, as_version=4)
    found = []
    for cell, after in zip(notebook.cells, notebook.cells[1:]):
        call = re.search(r"(?m)^print\(check_\w+\((\w+)\)\)$", cell.source)
        if cell.cell_type == "code" and call:
            folded = after.source.split("<summary>Solution</summary>")[1].split("</details>")[0]
            solution = re.search(r"(?s)```python\n(.*?)```", folded)[1]
            found.append((call[1], cell, solution))
    return found


def vocabulary(path):
    """What a solution may use: the imports and the functions of the notebook, but for those that need its variables."""
    scope = {}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
                    with contextlib.suppress(NameError):
                        exec(compile(ast.Module([node], []), path.name, "exec"), scope)
    return scope


@each_notebook
def test_notebook_has_two_to_four_exercises_and_its_stubs_are_saved_as_not_yet(path):
    found = published(path)
    assert 2 <= len(found) <= 4
    titles = re.findall(r"\*\*Exercise (\d+)\.(\d+)\b", "\n".join(c.source for c in nbformat.read(path, 4).cells))
    assert [(int(a), int(b)) for a, b in titles] == [(int(path.name[:2]), k) for k in range(1, len(found) + 1)]
    for function, cell, _ in found:
        assert re.search(rf"(?m)^def {function}\(.*\):\n    \.\.\.$", cell.source), "the stub is a def and three dots"
        assert "".join(output.get("text", "") for output in cell.outputs).startswith("Not yet")


@each_notebook
def test_each_published_solution_passes_in_place_of_its_stub(path):
    for function, cell, solution in published(path):
        scope, shown = vocabulary(path), io.StringIO()
        stub = next(node for node in ast.parse(cell.source).body if getattr(node, "name", None) == function)
        rest = "\n".join(cell.source.splitlines()[stub.end_lineno :])
        with contextlib.redirect_stdout(shown):
            exec(f"{solution}\n{rest}", scope)
        assert shown.getvalue().startswith("Right"), f"{function}: {shown.getvalue()}"


def test_every_exercise_is_in_exactly_one_notebook():
    cells = [cell.source for path in NOTEBOOKS for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    for parameter in EXERCISES:
        name = parameter.id.split(".")[1]
        assert sum(f"print({name}(" in cell for cell in cells) == 1, name
