"""Notebook 03 in the hands of a student."""

import re


def test_a_student_drags_the_ratio_across_the_clip(open_notebook, picture):
    notebook = open_notebook("03_clipping")
    notebook.assert_static_twins()
    clip = notebook.cell(re.compile(r"^ClipExplorer\("))
    clip.sees("objective: the smaller one")
    notebook.run_all()

    clip.sees("the band is 0.80 to 1.20")
    height = clip.height()
    clip.drag("ratio", to=0.4)
    clip.sees("Inside the band: the clip does nothing. Slope +1")
    clip.drag("ratio", to=0.6)
    clip.sees("slope 0")
    clip.sees("● left alone")
    picture(clip, "clip_explorer")
    clip.click("A = −1")
    clip.sees("slope −1")
    clip.sees("▼ pushed down")
    for _ in range(8):
        clip.click("◀ −0.1")
    clip.sees("slope 0")
    clip.choose("high side", "0.28 (DAPO)")
    clip.sees("the band is 0.80 to 1.28")
    assert clip.height() == height, "nothing below the widget has moved"
