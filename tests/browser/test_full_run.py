"""Notebook 05 in the hands of a student."""

import re


def test_a_student_compares_runs(open_notebook, picture):
    notebook = open_notebook("05_full_run")
    notebook.assert_static_twins()
    lab = notebook.cell(re.compile(r"\bBetaLab\("))
    lab.sees("greedy accuracy, 95 % interval")
    notebook.run_all()

    lab.sees("Next run: ")
    lab.slide("beta", "ArrowRight", 11)  # From 0.08 by 0.02.
    lab.sees("Next run: beta 0.3;")
    before = lab.text().count("finished")
    lab.click("Run")
    lab.sees(re.compile(r" \d+\s+beta 0\.3\s+0\.\d+ \[.*\]\s+0\.\d+\s+\d+\.\d\s+finished"), seconds=60)
    assert lab.text().count("finished") == before + 2  # The row, and the line beside the progress bar.
    picture(lab, "beta_lab")

    lab.slide("iterations", "ArrowRight", 8)
    lab.sees("iterations 60")
    lab.click("Run")
    lab.sees(re.compile(r"running at iteration [1-9]"), seconds=30)
    lab.click("Stop")
    lab.sees(re.compile(r"stopped at iteration \d+ of 60"))
    lab.slide("iterations", "ArrowLeft", 11)
    lab.sees("iterations 5")
    lab.click("Run")
    lab.sees("finished at iteration 5 of 5", seconds=30)
    lab.slide("group size", "ArrowLeft", 7)
    lab.sees("Not possible: group_size is 1, but it must be at least 2")

    lab.run()
    lab.sees("press Run")
    assert lab.output.locator(".widget-vbox").count() == 1
    notebook.open()  # The page is loaded again; the kernel is still there.
    again = notebook.cell(re.compile(r"\bBetaLab\("))
    again.run()
    again.click("Run")
    again.sees("finished at iteration 20 of 20", seconds=60)
