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
    rows = lab.output.locator("tr").count() or 1  # The header comes with the first run.
    lab.click("Run")
    lab.sees(re.compile(r" \d+\s+beta 0\.3\s+0\.\d+ \[.*\]\s+0\.\d+\s+\d+\.\d\s+finished"), seconds=60)
    assert lab.output.locator("tr").count() == rows + 1
    picture(lab, "beta_lab")

    lab.slide("iterations", "ArrowRight", 8)
    lab.sees("Next run: beta 0.3, iterations 60;")
    lab.click("Run")
    lab.sees(re.compile(r"running at iteration [1-9]"), seconds=30)
    lab.click("Stop")
    lab.sees(re.compile(r"stopped at iteration \d+ of 60"))
    lab.slide("iterations", "ArrowLeft", 11)
    lab.sees("Next run: beta 0.3, iterations 5;")
    lab.click("Run")
    lab.sees("finished at iteration 5 of 5", seconds=30)
    lab.slide("group size", "ArrowLeft", 7)
    lab.sees("Not possible: group_size must be at least 2")

    lab.run()
    lab.sees("press Run")
    assert lab.output.locator(".widget-vbox").count() == 1
    notebook.open()  # The page is loaded again; the kernel is still there.
    again = notebook.cell(re.compile(r"\bBetaLab\("))
    again.run()
    again.click("Run")
    again.sees("finished at iteration 20 of 20", seconds=60)
