"""ChainPlayer: nothing is given away before the guess, and then every step stands below the swap it belongs to."""

import html
import json
import re
import threading
from dataclasses import asdict, replace

import pytest
from matplotlib.figure import Figure

from grpo_core.lab import chain_player, panel
from grpo_core.lab import player as player_module
from grpo_core.lab.chain_player import ChainPlayer, Frame, line_up, mark, verdict

# 2bafd: b swaps 1 and 3, a swaps 1 and 2, f swaps 3 and 4, d swaps 2 and 3. By hand, the ball is under 2, 2, 1, 1, 1.
FRAMES = [
    Frame(0, "2bafd", "1", ("=1;", "=3;", ">2=1;", ">1=4;"), (1.0, 0.0, 1.0, 0.0), {0: 6, 1: 2, 2: 1, 3: 1}, 0.37, 4.6),
    Frame(5, "2bafd", "1", (">2>1>1=1;", ">2>2=1;", "=1", "<b>;"), (1.0, 1.0, 0.0, 0.0), {0: 2, 3: 8}, 0.52, 5.25),
    Frame(40, "2bafd", "1", (">2>1>1=1;",) * 4, (1.0,) * 4, {0: 0, 3: 10, 4: 0}, 0.95, 8.8),
]


@pytest.fixture(autouse=True)
def drawings(monkeypatch):
    """Pictures are kept as functions: drawing each one would take most of the time of these tests."""
    kept = []
    monkeypatch.setattr(
        chain_player, "figure_html", lambda draw, alt, size: kept.append(draw) or f'<img alt="{html.escape(alt)}">'
    )
    return kept


def axes_of(drawing):
    figure = Figure()
    drawing(figure)
    return figure.axes


@pytest.fixture
def player():
    made = ChainPlayer(FRAMES)
    yield made
    made.close()


def table(shown):
    rows = re.findall("<tr>(.*?)</tr>", shown)
    return [[html.unescape(cell) for cell in re.findall("<(?:b|span)>(.*?)</(?:b|span)></td>", row)] for row in rows[1:]]


def gives_away(shown):
    """Whether text or alternative text says where the ball ends, or what the policy answered."""
    return any(word in shown for word in ("ball ends", "=1;", "right", "wrong", "2, 2, 1, 1, 1"))


@pytest.mark.parametrize("prompt", ["", "2", "bafd", "5bafd", "0a", "2bag", "2ba;", "²a"])
def test_a_prompt_that_is_no_shell_game_is_refused_in_words(prompt):
    with pytest.raises(ValueError, match="is not a cup from 1234 and swaps from abcdef"):
        ChainPlayer([replace(FRAMES[0], prompt=prompt)])


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("=3;", ["·", "·", "·", "=3"]), (">2=3;", [">2", "·", "·", "=3"]), (">2>4=3;", [">2", ">4", "·", "=3"]),
        (">2>4>4=3;", [">2", ">4", ">4", "=3"]), (">2>4>4=3", [">2", ">4", ">4", "=3"]),
        (">2>4>4>3=3;", [">2", ">4", ">4", "=3"]), (">>2=3;", ["·", "·", "·", "=3"]), (">2;", [">2", "·", "·", "·"]),
        ("3bd=1;", ["·", "·", "·", "=1"]), ("=1;=2", ["·", "·", "·", "=2"]),
        ("=12;", ["·"] * 4), ("=;", ["·"] * 4), (";", ["·"] * 4), ("", ["·"] * 4),
    ],
)  # fmt: skip
def test_steps_stand_below_their_swap_and_the_answer_below_the_last(text, steps):
    assert line_up(text, 4) == steps


def test_nothing_is_given_away_before_the_guess(player):
    for player.slider.value in range(3):
        assert not gives_away(player.html.value) and table(player.html.value) == []
    assert "starts under cup 2" in player.html.value and "hidden until you guess" in player.html.value
    assert "<b>b</b> swaps cups 1 and 3, <b>a</b> swaps cups 1 and 2" in player.html.value


@pytest.mark.parametrize(("cup", "said"), [(1, "✓ right"), (2, "✗ wrong"), (4, "✗ wrong")])
def test_a_guess_is_judged_and_the_way_is_shown(player, cup, said):
    player.cup_buttons[cup - 1].click()
    assert f"You guessed cup {cup}: <b>{said}</b>. The ball ends under cup 1." in player.html.value
    assert "the way of the ball, 2, 2, 1, 1, 1" in player.html.value and table(player.html.value)
    assert all(control.disabled for control in (*player.cup_buttons, player.show))


def test_a_reader_who_will_not_guess_is_not_judged(player):
    player.show.click()
    assert "You guessed" not in player.html.value and "The ball ends under cup 1." in player.html.value


def test_the_first_guess_counts_for_all_iterations(player):
    player.guess(3)
    player.guess(1)
    player.player.move(+1)
    assert "You guessed cup 3: <b>✗ wrong</b>" in player.html.value


def test_another_prompt_is_another_guess():
    player = ChainPlayer([FRAMES[0], replace(FRAMES[1], prompt="1a", answer="2", texts=("=2;",), rewards=(1.0,))])
    player.guess(1)
    player.player.move(+1)
    assert "starts under cup 1" in player.html.value and not gives_away(player.html.value)
    assert not any(control.disabled for control in (*player.cup_buttons, player.show))
    player.guess(2)
    assert "You guessed cup 2: <b>✓ right</b>" in player.html.value
    player.player.move(-1)
    assert "You guessed cup 1: <b>✓ right</b>" in player.html.value
    player.close()


def test_steps_are_lined_up_below_the_way_and_wrong_ones_carry_a_sign(player):
    player.show.click()
    assert table(player.html.value) == [
        ["the ball", "2", "1", "1", "1", ""],
        ["=1;", "·", "·", "·", "=1", "✓ right"],
        ["=3;", "·", "·", "·", "=3 ✗", "✗ wrong"],
        [">2=1;", ">2", "·", "·", "=1", "✓ right"],
        [">1=4;", ">1 ✗", "·", "·", "=4 ✗", "✗ wrong"],
    ]
    player.player.move(+1)
    assert table(player.html.value)[2:] == [
        [">2>2=1;", ">2", ">2 ✗", "·", "=1", "✓ right"],
        ["=1", "·", "·", "·", "=1", "✗ never ended"],
        ["<b>;", "·", "·", "·", "·", "✗ wrong"],
    ]
    assert "<b>;" not in player.html.value and "2 of 4 completions" in player.html.value


def test_each_iteration_tells_of_many_completions(player):
    told = "Iteration <b>0</b>, 10 completions of many prompts: accuracy <b>0.37</b>, mean length <b>4.6</b> tokens."
    assert told in player.html.value
    assert "steps shown, 0 by 60%, 1 by 20%, 2 by 10%, 3 by 10%." in player.html.value
    player.slider.value = 2
    assert "Iteration <b>40</b>" in player.html.value and "steps shown, 3 by 100%." in player.html.value


def test_both_ends(player):
    assert (player.back.disabled, player.step.disabled) == (True, False)
    player.back.click()
    assert player.frame.iteration == 0
    player.step.click()
    assert player.frame.iteration == 5 and not player.back.disabled
    player.step.click()
    player.step.click()
    assert player.frame.iteration == 40 and (player.back.disabled, player.step.disabled) == (False, True)
    for by, end in ((+1, 40), (-100, 0), (-1, 0), (+100, 40)):
        player.player.move(by)
        assert player.frame.iteration == end


def test_play_walks_to_the_end_and_begins_again_from_there(player, monkeypatch):
    monkeypatch.setattr(player_module, "SECONDS", 0.01)
    for _ in range(2):
        ended, seen = threading.Event(), []
        player.slider.observe(lambda change, seen=seen: seen.append(change["new"]), "value")
        player.play.observe(lambda change, ended=ended: ended.set() if change["new"] == "Play" else None, "description")
        player.play.click()
        assert ended.wait(20) and player.frame.iteration == 40 and seen[-2:] == [1, 2]


def test_play_stops_when_pressed_again_and_when_the_panel_is_closed(player):
    for stop in (player.play.click, player.close):
        player.play.click()
        assert player.play.description == "Stop"
        stop()
        assert player.play.description == "Play" and player.frame.iteration == 0


def test_the_picture_is_the_way_and_the_shares_of_this_batch(player, drawings):
    ball, bars = axes_of(drawings[-1])
    assert [list(line.get_ydata()) for line in ball.lines] == [[2]] and ball.texts[0].get_text() == "?"
    assert [bar.get_height() for bar in bars.patches] == [0.6, 0.2, 0.1, 0.1]
    player.guess(None)
    ball, _ = axes_of(drawings[-1])
    assert list(ball.lines[-1].get_ydata()) == [2, 2, 1, 1, 1] and not ball.texts
    crossings = [tuple(line.get_ydata()) for line in ball.lines[:4]]
    assert crossings == [(1, 3), (2, 2), (3, 1), (4, 4)], "swap b changes cups 1 and 3"
    player.slider.value = 2
    assert [bar.get_height() for bar in axes_of(drawings[-1])[1].patches] == [0, 0, 0, 1]


def test_the_picture_is_a_picture(player, monkeypatch):
    monkeypatch.setattr(chain_player, "figure_html", panel.figure_html)
    player.guess(4)
    assert re.search(r'<img alt="Left: [^"]+" width="826" height="\d+" src="data:image/png;base64,\w+', player.html.value)


def test_frames_come_from_a_file(tmp_path, player):
    file = tmp_path / "recording.json"
    file.write_text(json.dumps([asdict(frame) for frame in FRAMES]))
    read = ChainPlayer.from_json(file)
    assert [frame.lengths for frame in read.frames] == [frame.lengths for frame in FRAMES]
    for made in (read, player):
        made.guess(2)
        made.slider.value = 1
    assert read.html.value == player.html.value
    read.close()


def test_no_frames_are_refused_in_words():
    with pytest.raises(ValueError, match="give at least one iteration"):
        ChainPlayer([])


def test_a_single_frame_can_be_shown():
    player = ChainPlayer(FRAMES[:1])
    assert player.back.disabled and player.step.disabled
    player.guess(1)
    assert "✓ right" in player.html.value
    player.close()


def test_the_saved_page_folds_the_solution(player):
    open_part, folded = player._repr_mimebundle_()[0]["text/html"].split("<details>")
    assert not gives_away(open_part) and "starts under cup 2" in open_part and "<img alt=" in open_part
    assert "✓ right" in folded and "&lt;b&gt;;" in folded
    assert [int(i) for i in re.findall(r"Iteration <b>(\d+)</b>", folded)] == [0, 5, 40]


@pytest.mark.parametrize(("text", "reward", "said"), [("=1;", 1, "✓ right"), ("=2;", 0, "✗ wrong"), ("=1", 0, "✗ never ended")])
def test_verdicts_carry_a_sign(text, reward, said):
    assert verdict(text, reward) == said


def test_a_step_that_is_not_shown_is_not_wrong():
    assert mark("·", "1") == "·" and mark(">1", "1") == ">1" and mark(">3", "1") == ">3 ✗"
