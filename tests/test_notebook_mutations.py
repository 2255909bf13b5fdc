"""If the algorithm is wrong, a notebook turns red: known faults, planted in a copy of grpo_core, one at a time."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAULTS = {
    "sample std by default": (
        "02_group_advantages",
        "advantages.py",
        "std_eps: float = 1e-4, correction: int = 0) -> Tensor",
        "std_eps: float = 1e-4, correction: int = 1) -> Tensor",
    ),
    "sign of the advantage": (
        "02_group_advantages",
        "advantages.py",
        "centered = rewards - rewards.mean(dim=1, keepdim=True)",
        "centered = rewards.mean(dim=1, keepdim=True) - rewards",
    ),
    "maximum for negative advantages": (
        "03_clipping",
        "surrogate.py",
        "return torch.minimum(r * per_row, r.clamp(low, high) * per_row)",
        "plain, kept = r * per_row, r.clamp(low, high) * per_row\n"
        "    return torch.where(per_row > 0, torch.minimum(plain, kept), torch.maximum(plain, kept))",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_notebook_notices(fault, tmp_path):
    """nbval as in every other run, up to the first failure. It must be a cell that fails, not the start of pytest."""
    notebook, file, right, wrong = FAULTS[fault]
    source = ROOT / "notebooks" / f"{notebook}.ipynb"
    shutil.copytree(ROOT / "grpo_core", tmp_path / "grpo_core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("test_*", "data", "__pycache__"))
    for path in (ROOT / "conftest.py", ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    (tmp_path / "notebooks").mkdir()
    shutil.copy(source, tmp_path / "notebooks")
    planted = tmp_path / "grpo_core" / file
    text = planted.read_text(encoding="utf-8")
    assert text.count(right) == 1, "the code has changed: plant the fault anew"
    planted.write_text(text.replace(right, wrong), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "notebooks"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout
    assert "Notebook cell execution failed" in run.stdout
    assert "ModuleNotFoundError" not in run.stdout
