"""GroupStepper, moved as a reader moves it: by value and by click."""

import re
import threading
import time
from html.parser import HTMLParser

import pytest

from grpo_core.lab import RECORDED_GROUP, Group, GroupStepper
from grpo_core.lab.group_stepper import SCALES, direction, signed

RIGHT, WRONG = "+1.732", "−0.577"


class Page(HTMLParser):
    """What a browser would show: the text without tags, and the tags."""

    def __init__(self, source):
        super().__init__()
        self.text, self.tags, self.images = "", [], []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attributes))

    def handle_data(self, data):
        self.text += data


def shown(stepper):
    return Page(stepper.html.value).text


def advantage(stepper):
    return re.search(r"Advantage (\S+): (. [\w ]+)\.", shown(stepper)).groups()


@pytest.fixture
def stepper():
    made = GroupStepper()
    yield made
    made.close()


def test_every_step_tells_its_sample(stepper):
    so_far = [0, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 2 / 6, 2 / 7, 2 / 8]  # Two of eight are right: the second and the sixth.
    for i, (text, reward) in enumerate(zip(RECORDED_GROUP.texts, RECORDED_GROUP.rewards)):
        assert stepper.slider.value == i
        assert f"Sample {i + 1} of 8: 24+48={text}. Reward {reward:g}. Mean so far {so_far[i]:.3f}." in shown(stepper)
        assert "Whole group: mean 0.250, std 0.433." in shown(stepper)
        assert advantage(stepper) == ((RIGHT, "▲ pushed up") if reward else (WRONG, "▼ pushed down"))
        stepper.next.click()


def test_both_ends(stepper):
    assert (stepper.back.disabled, stepper.next.disabled) == (True, False)
    stepper.back.click()
    assert stepper.slider.value == 0
    stepper.slider.value = 7
    assert (stepper.back.disabled, stepper.next.disabled) == (False, True)
    stepper.next.click()
    assert stepper.slider.value == 7
    stepper.back.click()
    assert (stepper.slider.value, stepper.back.disabled, stepper.next.disabled) == (6, False, False)


def test_exactly_the_present_row_is_marked(stepper):
    for i in range(8):
        stepper.slider.value = i
        rows = re.findall(r"<tr>(.*?)</tr>", stepper.html.value)[1:]
        assert [("▶" in row) for row in rows] == [k == i for k in range(8)]


@pytest.mark.parametrize(
    ("scale", "right", "wrong"),
    [("population std", RIGHT, WRONG), ("sample std", "+1.620", "−0.540"), ("no division (Dr. GRPO)", "+0.750", "−0.250")],
)
def test_divisors(stepper, scale, right, wrong):
    stepper.scale.value = scale
    assert advantage(stepper)[0] == wrong
    stepper.slider.value = 1
    assert advantage(stepper)[0] == right


def test_every_divisor_is_tested():
    assert len(SCALES) == 3


@pytest.mark.parametrize(("eps", "right"), [(0.0, "+1.732"), (1e-2, "+1.693"), (1.0, "+0.523")])
def test_std_eps(stepper, eps, right):
    """0.75 / (0.4330 + eps)."""
    stepper.slider.value = 1
    stepper.std_eps.value = eps
    assert advantage(stepper)[0] == right


@pytest.mark.parametrize("typed", ["1 1 1 1 1 1 1 0", "1,1,1,1,1,1,1,0", " 1, 1  1 1 1 1 1.0 0e0 "])
def test_typed_rewards(stepper, typed):
    stepper.rewards.value = typed
    assert advantage(stepper)[0] == "+0.378"
    stepper.slider.value = 7
    assert advantage(stepper) == ("−2.645", "▼ pushed down")


def test_flat_rewards_push_nobody(stepper):
    stepper.rewards.value = " ".join(["0.7"] * 8)
    assert advantage(stepper) == ("0.000", "● left alone")


@pytest.mark.parametrize(
    "typed", ["1 2 3", "", "a b c d e f g h", "1 1 1 1 1 1 1 nan", "inf 0 0 0 0 0 0 0", "1e99 0 0 0 0 0 0 0", "<b>"]
)
def test_bad_rewards_are_explained_and_change_nothing(stepper, typed):
    before = stepper.html.value
    stepper.rewards.value = typed
    assert shown(stepper) == ("Not possible: 8 numbers are wanted, one for each completion, such as 0 1 0 0 0 1 0 0")
    stepper._repr_mimebundle_()
    stepper.recorded.click()
    assert stepper.html.value == before


def test_fresh_group_is_sampled_and_the_recorded_one_comes_back(stepper):
    before = stepper.html.value
    stepper.slider.value = 5
    seen = set()
    for _ in range(3):
        stepper.fresh.click()
        assert stepper.slider.value == 0
        assert len(stepper.group.texts) == 8
        assert stepper.group.rewards == [float(text == "72;") for text in stepper.group.texts]
        assert f"24+48={stepper.group.texts[0]}" in shown(stepper)
        seen.add(tuple(stepper.group.texts))
    assert len(seen) > 1, "fresh groups are different"
    stepper.recorded.click()
    assert stepper.html.value == before


class Clock(threading.Event):
    """A stop event that does not wait: Play runs at once."""

    def wait(self, timeout=None):
        return self.is_set()


def threads_of(stepper):
    return [thread for thread in threading.enumerate() if getattr(thread, "_target", None) == stepper.player._step_by_itself]


def until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it never happened")


def test_play_walks_to_the_end_and_stops(stepper, monkeypatch):
    monkeypatch.setattr(threading, "Event", Clock)
    visited = []
    stepper.slider.observe(lambda change: visited.append(change.new), "value")
    stepper.play.click()
    until(lambda: not threads_of(stepper) and stepper.slider.value == 7)
    assert visited == list(range(1, 8))
    assert stepper.play.description == "Play"
    stepper.play.click()
    until(lambda: not threads_of(stepper) and stepper.slider.value == 7)
    assert visited == [*range(1, 8), *range(8)], "from the end it begins again"


def test_play_pressed_again_stops(stepper):
    stepper.play.click()
    assert stepper.play.description == "Stop"
    stepper.play.click()
    assert stepper.play.description == "Play"
    until(lambda: not threads_of(stepper))
    assert stepper.slider.value == 0


def test_play_stop_play_leaves_one_thread(stepper):
    for _ in range(3):
        stepper.play.click()
    until(lambda: len(threads_of(stepper)) == 1)
    stepper.play.click()
    until(lambda: not threads_of(stepper))


def test_closing_ends_play(stepper):
    stepper.play.click()
    stepper.close()
    until(lambda: not threads_of(stepper))


def test_is_saved_with_all_eight_rows_and_a_picture(stepper):
    stepper.slider.value = 3
    bundle, _ = stepper._repr_mimebundle_()
    page = Page(bundle["text/html"])
    assert bundle["text/plain"] == "<GroupStepper>"
    assert page.tags.count("tr") == 9
    assert page.text.count(RIGHT) == page.text.count("▲ pushed up") == page.text.count("right") == 2
    assert page.text.count(WRONG) == page.text.count("▼ pushed down") == page.text.count("wrong") == 6
    (picture,) = page.images
    assert picture["alt"].startswith(f"Advantages of the group: 74; {WRONG}, 72; {RIGHT}, ")
    assert picture["src"].startswith("data:image/png;base64,")
    assert "▶" not in page.text, "nothing can be stepped through there"


def test_what_a_policy_writes_cannot_break_the_page():
    hostile = Group("<i>", "7", ("<b>&", r"$\frac$", "</div>", '"><script>'), (1.0, 0.0, 0.0, 0.0))
    stepper = GroupStepper(hostile)
    for i, text in enumerate(hostile.texts):
        stepper.slider.value = i
        page = Page(stepper.html.value)
        assert f"<i>{text}" in page.text
        assert not {"i", "script"} & set(page.tags)
        assert page.tags.count("div") == 1
        assert all(text in page.images[0]["alt"] for text in hostile.texts)


def test_a_group_of_another_size():
    stepper = GroupStepper(Group("1+1=", "2", ("2;", "3;"), (1.0, 0.0)))
    assert "Sample 1 of 2" in shown(stepper)
    assert advantage(stepper)[0] == "+1.000"
    stepper.rewards.value = "1"
    assert "2 numbers are wanted" in shown(stepper)


def test_works_on_another_thread(stepper):
    thread = threading.Thread(target=stepper.next.click)
    thread.start()
    thread.join()
    assert "Sample 2 of 8" in shown(stepper)
    assert advantage(stepper)[0] == RIGHT


def test_every_state_has_the_same_height(stepper):
    heights = set()
    for change in (stepper.next.click, stepper.fresh.click, lambda: stepper.rewards.set_trait("value", "x")):
        change()
        heights.add(re.search(r"min-height:(\d+)px", stepper.html.value)[1])
    assert len(heights) == 1


@pytest.mark.parametrize(
    ("value", "text", "push"),
    [(2.0, "+2.000", "▲ pushed up"), (-0.5, "−0.500", "▼ pushed down"), (0.0, "0.000", "● left alone")],
)
def test_sign_and_word_say_the_same(value, text, push):
    assert (signed(value), direction(value)) == (text, push)
