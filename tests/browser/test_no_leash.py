"""Notebook 08 in the hands of a student."""

import re


def test_a_student_takes_the_leash_off_and_tries_a_grader(open_notebook, picture):
    notebook = open_notebook("08_no_leash")
    notebook.assert_static_twins()
    explorer, lab = notebook.cell(re.compile(r"\bGoodhartExplorer\(")), notebook.cell(re.compile(r"\bGraderLab\("))
    explorer.sees("the grader pays")
    lab.sees("Press Run to train against your grader")
    notebook.run_all()

    explorer.sees("beta 0, iteration 50, mean of 3 seeds")
    explorer.sees(re.compile(r"truly right are 0\.0\d"))
    explorer.sees("◀ paid, but wrong")
    height = explorer.height()
    picture(explorer, "goodhart_explorer")
    explorer.slide("iteration", "ArrowLeft", 25)
    explorer.sees("iteration 0, mean of 3 seeds")
    explorer.slide("beta", "ArrowRight", 3)
    explorer.sees("beta 0.3, iteration 0")
    explorer.slide("iteration", "ArrowRight", 25)
    explorer.sees("beta 0.3, iteration 50")
    explorer.sees(re.compile(r"truly right are 0\.[3-9]"))
    explorer.choose("prompt", "76+58=")
    explorer.sees("true answer 134")
    assert explorer.height() == height, "nothing below the widget has moved"

    lab.sees("Press Run to train against your grader")
    lab.click("Run")
    lab.sees(re.compile(r"Iteration [1-9]\d?: greedy accuracy"), seconds=60)
    lab.sees(re.compile(r"Your grader pays 0\.\d+ a sample"), seconds=60)
    lab.click("Stop")
    picture(lab, "grader_lab")
