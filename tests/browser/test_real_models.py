"""Notebook 09 in the hands of a student."""

import re

import pytest

pytest.importorskip("transformers", reason='needs pip install -e ".[real]"')


def test_a_student_types_answers_and_weighs_models(open_notebook, picture):
    notebook = open_notebook("09_real_models")
    notebook.assert_static_twins()
    lab, explorer = notebook.cell(re.compile(r"\bAnswerLab\(")), notebook.cell(re.compile(r"\bMemoryExplorer\("))
    lab.sees("anywhere in the text")
    explorer.sees("Qwen2.5-72B")
    notebook.run_all()

    height = lab.height()
    lab.choose("example", "4. #### 172")
    lab.sees("✗ a mistake: the answer is wrong")
    picture(lab, "answer_lab")
    lab.type("completion", "It is 71. No: #### $72.00")
    lab.sees("is_right reads 72")
    lab.click("right")
    lab.sees("Wrong is who refuses a right answer")
    assert lab.height() == height, "nothing below the widget has moved"

    explorer.sees("at least 2 GPUs of 80 GB")
    explorer.choose("method", "PPO with a critic and a leash")
    explorer.sees("at least 4 GPUs of 80 GB")
    explorer.click("LoRA, rank 16")
    explorer.sees(re.compile(r"at least [12] GPUs? of 80 GB"))
    explorer.choose("model", "Qwen2.5-72B")
    explorer.click("all weights")
    explorer.sees("at least 31 GPUs of 80 GB")
    picture(explorer, "memory_explorer")
