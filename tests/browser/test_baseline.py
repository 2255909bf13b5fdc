"""Notebook 01 in the hands of a student."""

import re


def test_a_student_asks_the_policy_and_measures_the_value(open_notebook, picture):
    notebook = open_notebook("01_baseline")
    notebook.assert_static_twins()
    sampler, meter = notebook.cell(re.compile(r"^Sampler\(")), notebook.cell(re.compile(r"^ValueMeter\("))
    sampler.sees("24+48= at temperature 0.7")
    notebook.run_all()

    picture(sampler, "sampler")
    sampler.type("sum", "57 + 36")
    sampler.sees("57+36= at temperature 0.7")
    sampler.sees("The true answer is 93")
    before = sampler.text()
    sampler.click("ask again")
    sampler.changes(before)
    sampler.type("sum", "two and two")
    sampler.sees("Not possible: the policy cannot read")
    sampler.type("sum", "24+48")
    sampler.sees("The true answer is 72")
    sampler.slide("temperature", "ArrowRight")
    sampler.sees("at temperature 0.8")

    picture(meter, "value_meter")
    meter.sees("G = 8, asked once")
    meter.slide("G", "ArrowRight")
    meter.sees("G = 16, asked once")
    meter.click("ask again")
    meter.sees("G = 16, asked 2 times")
    meter.slide("G", "ArrowLeft", 2)
    meter.sees("G = 4, asked 2 times")
