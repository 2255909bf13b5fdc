"""Notebook 04 in the hands of a student."""

import re


def test_a_student_moves_the_policy_away_from_the_reference(open_notebook, picture):
    notebook = open_notebook("04_kl_estimators")
    notebook.assert_static_twins()
    gaussians, leash = notebook.cell(re.compile(r"^GaussianKL\(")), notebook.cell("explorer = LeashExplorer(")
    gaussians.sees("k3: bias, std")
    notebook.run_all()

    gaussians.sees("mu² / 2 = 0.5000")
    gaussians.sees("Least spread: k3")
    picture(gaussians, "gaussian_kl")
    gaussians.slide("mean mu", "ArrowRight", 4)
    gaussians.sees("N(1.20, 1). KL(policy ‖ reference) = mu² / 2 = 0.7200")
    gaussians.sees("Least spread: k1")  # Beyond mu = 1.121 k3 is not the quieter one.
    gaussians.choose("k3", "flipped")
    gaussians.sees("k3 flipped")
    before = gaussians.text()
    gaussians.click("draw again")
    gaussians.changes(before)

    leash.sees("Weights 1 of the way")
    picture(leash, "leash_explorer")
    leash.slide("distance", "ArrowLeft", 5)
    leash.sees("Weights 0 of the way")
    leash.sees("KL(policy ‖ reference) at the tokens of the table: 0.000 nats")
    leash.slide("distance", "ArrowRight", 10)
    leash.sees("Weights 2 of the way")
    leash.choose("sampled by", "the reference (stale)")
    leash.sees(re.compile(r"k1\s+−"))  # On borrowed samples the estimate is negative.
