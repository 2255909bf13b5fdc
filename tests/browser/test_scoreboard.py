"""Notebook 06 in the hands of a student."""

import re


def test_a_student_compares_two_methods(open_notebook, picture):
    notebook = open_notebook("06_scoreboard")
    notebook.assert_static_twins()
    board = notebook.cell(re.compile(r"^ScoreboardExplorer\("))
    board.sees("One update on this group alone")
    notebook.run_all()

    board.sees("GRPO ends at")
    board.sees(re.compile(r"Difference [+−]0\.\d+"))
    height = board.height()
    board.choose("against", "DPO")
    board.sees(re.compile(r"DPO ends at 0\.\d+"))
    board.sees("▼ −1.50")
    board.click("160 gradient steps")
    board.choose("x axis", "tokens trained on")
    board.output.get_by_role("img", name=re.compile("against tokens trained on: GRPO from .*, DPO from")).wait_for()
    picture(board, "scoreboard_explorer")
    board.choose("group", "worked group")
    board.sees("was sampled by another policy")
    board.choose("against", "PPO, reward model")
    board.sees("PPO, reward model ends at", seconds=60)  # The first time, its critic and its judge are trained.
    board.choose("against", "GRPO")
    board.sees("Pick two different methods")
    assert board.height() == height, "nothing below the widget has moved"
