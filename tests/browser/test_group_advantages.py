"""Notebook 02 in the hands of a student."""


def test_a_student_steps_through_the_group(open_notebook, picture):
    notebook = open_notebook("02_group_advantages")
    notebook.assert_static_twins()
    stepper = notebook.cell("GroupStepper()")
    assert stepper.text().count("+1.732") == 2
    notebook.run_all()

    stepper.sees("Sample 1 of 8")
    height = stepper.height()
    stepper.click("Next ▶")
    stepper.sees("Sample 2 of 8: 24+48=72;")
    stepper.sees("Advantage +1.732: ▲ pushed up")
    picture(stepper, "stepper")
    stepper.slide("sample", "ArrowRight", 4)
    stepper.sees("Sample 6 of 8: 24+48=72;")
    stepper.sees("Advantage +1.732: ▲ pushed up")
    stepper.slide("sample", "ArrowLeft")
    stepper.sees("Advantage −0.577: ▼ pushed down")
    stepper.choose("divide by", "sample std")
    stepper.sees("Advantage −0.540")
    stepper.choose("divide by", "population std")

    stepper.type("rewards", "1 1 1 1 1 1 1 0")
    stepper.sees("mean 0.875")
    stepper.sees("−2.645")
    stepper.type("rewards", "1 2 what")
    stepper.sees("Not possible: 8 numbers are wanted")
    picture(stepper, "stepper_not_possible")
    stepper.click("fresh group")
    stepper.sees("Sample 1 of 8")
    stepper.click("recorded group")
    stepper.sees("Sample 1 of 8: 24+48=74;")
    assert stepper.height() == height, "nothing below the widget has moved"

    stepper.click("Play")
    stepper.sees("Sample 3 of 8")
    stepper.click("Stop")
    stepper.button("Play").wait_for()

    stepper.run()
    stepper.sees("Sample 1 of 8")
    assert stepper.output.locator(".widget-slider").count() == 1
    notebook.open()  # The page is loaded again; the kernel is still there.
    again = notebook.cell("GroupStepper()")
    again.run()
    again.click("Next ▶")
    again.sees("Advantage +1.732: ▲ pushed up")
