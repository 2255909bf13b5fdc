"""ChainPlayer: step through a training and watch the chains of one prompt grow longer, and become right.

The reader guesses the cup before any chain is shown: who has followed four swaps in the head knows what a direct answer
asks of the policy, and what small steps spare it. Left out: how the runs were made; they are only read here.
"""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ipywidgets as W

from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, button, figure_html, table_html
from grpo_core.lab.player import Player
from grpo_core.shell_game import CUPS, SWAPS, follow

NOT_SHOWN = "·"


@dataclass(frozen=True)
class Frame:
    """One iteration of a training.

    Attributes:
        iteration: its number.
        prompt, answer: the problem whose completions are shown.
        texts, rewards: its completions and their rewards.
        lengths: for each number of shown steps, how many of many completions, of other problems, show so many.
        accuracy, mean_length: of these many completions; the length in tokens, EOS included.
    """

    iteration: int
    prompt: str
    answer: str
    texts: Sequence[str]
    rewards: Sequence[float]
    lengths: dict[int, int]
    accuracy: float
    mean_length: float


class ChainPlayer(Panel):
    """Buttons for a guess; then Back, Step, Play and a slider go through the iterations.

    Args:
        frames: the iterations, in their order.

    Raises:
        ValueError: no frames, or a prompt that is not a cup and swaps.
    """

    player: Player | None = None

    def __init__(self, frames: Sequence[Frame]):
        if not frames:
            raise ValueError("there are no frames: give at least one iteration to show")
        for frame in frames:
            check_prompt(frame.prompt)
        self.frames = list(frames)
        self.guesses: dict[str, int | None] = {}  # By prompt; None is a reader who would rather see.
        iterations = [(str(frame.iteration), i) for i, frame in enumerate(self.frames)]
        self.slider = W.SelectionSlider(options=iterations, description="iteration")
        self.player = Player(self.slider, len(self.frames) - 1)
        self.back = button("◀ Back", lambda: self.player.move(-1), "previous iteration")
        self.step = button("Step ▶", lambda: self.player.move(+1), "next iteration")
        self.play = self.player.button
        self.cup_buttons = [button(f"cup {cup}", lambda cup=cup: self.guess(int(cup))) for cup in CUPS]
        self.show = button("show me", lambda: self.guess(None), "show the chains without a guess")
        self.slider.observe(self.refresh, "value")
        guessing = [W.Label("Your guess:"), *self.cup_buttons, self.show]
        super().__init__([guessing, [self.back, self.step, self.play, self.slider]], height=560)

    @classmethod
    def from_json(cls, path: Path | str) -> "ChainPlayer":
        """The frames of a file: a list of objects with the fields of `Frame`."""
        frames = json.loads(Path(path).read_text(encoding="utf-8"))
        lengths = [{int(steps): count for steps, count in frame["lengths"].items()} for frame in frames]
        return cls([Frame(**frame | {"lengths": counts}) for frame, counts in zip(frames, lengths)])

    @property
    def frame(self) -> Frame:
        return self.frames[self.slider.value]

    def guess(self, cup: int | None) -> None:
        """Take a guess, or none, and show the chains from now on."""
        self.guesses.setdefault(self.frame.prompt, cup)
        self.refresh()

    def close(self) -> None:
        if self.player is not None:
            self.player.halt()
        super().close()

    def view(self) -> str:
        frame, last = self.frame, len(self.frames) - 1
        shown = frame.prompt in self.guesses
        self.back.disabled, self.step.disabled = self.slider.value == 0, self.slider.value == last
        for control in (*self.cup_buttons, self.show):
            control.disabled = shown
        chains = self._verdict(frame) + self._chains(frame) if shown else self._question(frame)
        return self._story(frame) + self._picture(frame, shown) + chains

    def static(self) -> str:
        """The solution is folded: who reads the saved page may guess, too."""
        last = self.frames[-1]
        some = sorted({0, len(self.frames) // 4, len(self.frames) // 2, len(self.frames) - 1})
        chains = "".join(self._story(self.frames[i]) + self._chains(self.frames[i]) for i in some)
        solution = f"<details><summary>The way of the ball, and the chains</summary>{chains}</details>"
        return self._question(last) + self._story(last) + self._picture(last, shown=False) + solution

    def _story(self, frame: Frame) -> str:
        return (
            f"<p>Iteration <b>{frame.iteration}</b>, {sum(frame.lengths.values())} completions of many prompts: accuracy "
            f"<b>{frame.accuracy:.2f}</b>, mean length <b>{frame.mean_length:.1f}</b> tokens.</p>"
        )

    def _question(self, frame: Frame) -> str:
        start, *letters = frame.prompt
        told = ", ".join(f"<b>{letter}</b> swaps cups {' and '.join(SWAPS[letter])}" for letter in letters)
        return (
            f"<p>The prompt <code>{html.escape(frame.prompt)}</code> says: the ball starts under cup {start}, then {told}. "
            "Where is it at the end? Follow it in your head and guess; then you see what the policy writes.</p>"
        )

    def _verdict(self, frame: Frame) -> str:
        guess, end = self.guesses[frame.prompt], follow(frame.prompt)[-1]
        said = "" if guess is None else f"You guessed cup {guess}: <b>{'✓ right' if str(guess) == end else '✗ wrong'}</b>. "
        right = sum(reward > 0 for reward in frame.rewards)
        return (
            f"<p>{said}The ball ends under cup {end}. {right} of {len(frame.texts)} completions of "
            f"<code>{html.escape(frame.prompt)}</code> are right; ✗ marks each step that is not where the ball is.</p>"
        )

    def _chains(self, frame: Frame) -> str:
        """The completions, lined up by the swap that each step belongs to, below the true way."""
        cups = follow(frame.prompt)
        rows = [["the ball", *cups, ""]]
        for text, reward in zip(frame.texts, frame.rewards):
            steps = [mark(step, cup) for step, cup in zip(line_up(text, len(cups)), cups)]
            rows.append([text, *steps, verdict(text, reward)])
        *between, last = (f"after {letter}" for letter in frame.prompt[1:])
        return table_html(["completion", *between, f"{last}: the answer", "verifier"], rows, marked=0)

    def _picture(self, frame: Frame, shown: bool) -> str:
        def draw(figure):
            left, right = figure.subplots(1, 2, width_ratios=(3, 2))
            self._draw_way(left, frame, shown)
            self._draw_lengths(right, frame)

        total = sum(frame.lengths.values())
        lengths = ", ".join(f"{steps} by {count / total:.0%}" for steps, count in sorted(frame.lengths.items()) if count)
        path = ", ".join(frame.prompt[0] + follow(frame.prompt)) if shown else "hidden until you guess"
        return figure_html(draw, f"Left: the way of the ball, {path}. Right: steps shown, {lengths}.", size=(8.6, 2.4))

    def _draw_way(self, axes, frame: Frame, shown: bool) -> None:
        """Each cup is a line, each swap a crossing; the ball follows the thick line."""
        way, letters = [int(cup) for cup in frame.prompt[0] + follow(frame.prompt)], frame.prompt[1:]
        if shown:
            for x, letter in enumerate(letters):
                for cup in CUPS:
                    axes.plot((x, x + 1), (int(cup), int(follow(cup + letter))), color=GRAY, linewidth=0.8)
            axes.plot(range(len(way)), way, "o-", color=ORANGE, linewidth=3, markersize=9)
        else:
            axes.plot(0, way[0], "o", color=ORANGE, markersize=9)
            axes.text(len(letters) / 2, (len(CUPS) + 1) / 2, "?", fontsize=28, ha="center", va="center", color=GRAY)
        axes.set_xticks([x + 0.5 for x in range(len(letters))], [f"{letter}: {'↔'.join(SWAPS[letter])}" for letter in letters])
        axes.set_yticks([int(cup) for cup in CUPS], [f"cup {cup}" for cup in CUPS])
        axes.set(xlim=(-0.2, len(letters) + 0.2), ylim=(len(CUPS) + 0.5, 0.5), title=f"the ball of {frame.prompt}")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    def _draw_lengths(self, axes, frame: Frame) -> None:
        steps = range(1 + max(step for each in self.frames for step, count in each.lengths.items() if count))
        shares = [frame.lengths.get(step, 0) / sum(frame.lengths.values()) for step in steps]
        bars = axes.bar(steps, shares, color=BLUE)
        axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=9)
        axes.set_xticks(steps)
        axes.set(ylim=(0, 1.12), yticks=[0, 0.5, 1], title="share, by number of shown steps")
        axes.spines[["top", "right"]].set_visible(False)


def check_prompt(prompt: str) -> None:
    """A ValueError, unless the prompt is a cup and swaps."""
    if not re.fullmatch(f"[{CUPS}][{''.join(SWAPS)}]+", prompt):
        raise ValueError(f"{prompt!r} is not a cup from {CUPS} and swaps from {''.join(SWAPS)}, such as 3bace")


def line_up(text: str, swaps: int) -> list[str]:
    """The steps of a completion, one for each swap; the answer belongs to the last swap, however few are shown before it.

    >>> line_up(">2>4=3;", swaps=4), line_up("=3;", swaps=2), line_up(">3>", swaps=2)
    (['>2', '>4', '·', '=3'], ['·', '=3'], ['>3', '·'])
    """
    shown = re.findall(r">\d", re.match(r"(>\d)*", text)[0])[: swaps - 1]
    answer = re.search(r"=\d(?=;?$)", text)
    return [*shown, *[NOT_SHOWN] * (swaps - 1 - len(shown)), answer[0] if answer else NOT_SHOWN]


def mark(step: str, cup: str) -> str:
    """A step as it is shown: with a sign where the ball is somewhere else.

    >>> mark(">2", "2"), mark("=3", "1"), mark("·", "1")
    ('>2', '=3 ✗', '·')
    """
    return step if step == NOT_SHOWN or step[1:] == cup else f"{step} ✗"


def verdict(text: str, reward: float) -> str:
    """The verifier's decision in words and with a sign."""
    if reward > 0:
        return "✓ right"
    return "✗ wrong" if text.endswith(";") else "✗ never ended"
