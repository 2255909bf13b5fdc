"""The fingerprint of code changes with what the code does, and with nothing else."""

import pytest

from grpo_core.provenance import bare_source, code_version, start_policies

CODE = '''"""A head."""

import math  # why


def f(x):
    """Two
    lines."""
    text = "# no comment"
    return x  # what
'''


def test_words_about_the_code_do_not_count():
    assert bare_source(CODE) == 'import math\ndef f(x):\n    text = "# no comment"\n    return x'


@pytest.mark.parametrize("change", [("return x", "return -x"), ("import math", "import cmath"), ("# no", "# a")])
def test_code_counts(change):
    assert bare_source(CODE.replace(*change)) != bare_source(CODE)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the name, with three modules: a imports b, c stands alone."""
    import grpo_core

    folder = tmp_path / "grpo_core"
    folder.mkdir()
    for name, text in (("a", "from grpo_core.b import x\n"), ("b", "x = 1\n"), ("c", "y = 1\n")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(grpo_core, "__path__", [str(folder)])
    return folder


def test_version_follows_imports_and_nothing_else(package):
    before = code_version("grpo_core.a")
    (package / "c.py").write_text("y = 2\n")
    assert code_version("grpo_core.a") == before
    (package / "b.py").write_text("x = 2\n")
    assert code_version("grpo_core.a") != before


def test_a_module_that_is_imported_as_a_name_counts(package):
    (package / "a.py").write_text("from grpo_core import c\n")
    before = code_version("grpo_core.a")
    (package / "c.py").write_text("y = 2\n")
    assert code_version("grpo_core.a") != before


def test_each_start_policy_has_its_fingerprint():
    names = set(start_policies())
    assert names == {"start_policy.pt", "shell_game_start.pt", "sloppy_grader_start.pt"}
    assert len(set(start_policies().values())) == len(names)


def test_version_does_not_depend_on_the_order(package):
    assert (
        code_version("grpo_core.a", "grpo_core.c") == code_version("grpo_core.c", "grpo_core.a") != code_version("grpo_core.a")
    )
