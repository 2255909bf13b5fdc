"""Notebook 07 in the hands of a student."""

import re


def test_a_student_guesses_a_cup_and_watches_the_chains_grow(open_notebook, picture):
    notebook = open_notebook("07_growing_reasoning")
    notebook.assert_static_twins()
    player = notebook.cell(re.compile(r"^ChainPlayer\."))
    player.sees("Where is it at the end?")
    notebook.run_all()

    player.sees("Follow it in your head and guess")
    player.sees("Iteration 0,")
    height = player.height()
    picture(player, "chain_player_guess")
    player.click("cup 1")
    player.sees("You guessed cup 1: ✗ wrong")
    player.sees("The ball ends under cup 4.")
    assert player.button("cup 2").is_disabled()
    player.click("Step ▶")
    player.sees("Iteration 2,")
    player.slide("iteration", "ArrowRight", 3)
    player.sees("Iteration 8,")
    picture(player, "chain_player")
    player.slide("iteration", "ArrowRight", 16)
    player.sees("Iteration 40,")
    player.sees(re.compile(r"[78] of 8 completions"))
    player.click("Play")  # From the end, it begins again.
    player.sees(re.compile(r"Iteration [2468],"))
    player.click("Stop")
    player.click("◀ Back")
    assert player.height() == height, "nothing below the widget has moved"

    player.run()
    player.sees("Follow it in your head and guess")
    assert player.output.locator(".widget-vbox").count() == 1
