"""GroupStepper: walk through a group one completion at a time and watch each advantage come about."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ipywidgets as W
import torch

from grpo_core.advantages import group_advantages
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, button, figure_html, table_html
from grpo_core.lab.player import Player
from grpo_core.rollout import Rollout, sample_groups
from grpo_core.task import Addition, Problem
from grpo_core.warm_start import warm_start


@dataclass(frozen=True)
class Group:
    """One prompt, its completions and their rewards."""

    prompt: str
    answer: str
    texts: Sequence[str]
    rewards: Sequence[float]

    @classmethod
    def of(cls, rollout: Rollout, index: int = 0) -> "Group":
        """A group of a rollout."""
        rows = slice(index * rollout.group_size, (index + 1) * rollout.group_size)
        return cls(*rollout.problems[index], rollout.texts[rows], rollout.rewards[index].tolist())


RECORDED_GROUP = Group(
    "24+48=", "72", ("74;", "72;", "73;", "74;", "73;", "72;", "73;", "74;"), (0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
)
SCALES = {"population std": ("std", 0), "sample std": ("std", 1), "no division (Dr. GRPO)": ("none", 0)}


class GroupStepper(Panel):
    """Back, Next, Play, a slider and the arrow keys step through a group.

    Args:
        group: the group to begin with; the recorded one by default.
        policy: what fresh groups are sampled from; the start policy by default.
    """

    player: Player | None = None

    def __init__(self, group: Group = RECORDED_GROUP, policy=None):
        self.first, self.group, self.policy = group, group, policy
        last = len(group.texts) - 1
        self.slider = W.IntSlider(value=0, min=0, max=last, description="sample", readout=False)
        self.player = Player(self.slider, last)
        self.back = button("◀ Back", lambda: self.player.move(-1), "previous sample")
        self.next = button("Next ▶", lambda: self.player.move(+1), "next sample")
        self.play = self.player.button
        self.rewards = W.Text(value=_join(group.rewards), description="rewards", continuous_update=False)
        self.scale = W.Dropdown(options=list(SCALES), description="divide by")
        self.std_eps = W.Dropdown(options=[0.0, 1e-8, 1e-4, 1e-2, 1.0], value=1e-4, description="std eps")
        self.recorded = button("recorded group", lambda: self.show(self.first))
        self.fresh = button("fresh group", self.sample, "eight new completions of the live policy")
        for control in (self.slider, self.scale, self.std_eps):
            control.observe(self.refresh, "value")
        self.rewards.observe(self._read_rewards, "value")
        navigation = [self.back, self.next, self.play, self.slider]
        super().__init__([navigation, [self.recorded, self.fresh, self.rewards], [self.scale, self.std_eps]], height=510)

    @property
    def advantages(self) -> list[float]:
        scale, correction = SCALES[self.scale.value]
        rewards = torch.tensor([self.group.rewards])
        return group_advantages(rewards, scale, self.std_eps.value, correction)[0].tolist()

    def close(self) -> None:
        if self.player is not None:
            self.player.halt()
        super().close()

    def sample(self) -> None:
        """Replace the group by a fresh one of the live policy."""
        self.policy = warm_start() if self.policy is None else self.policy
        problem = Problem(self.first.prompt, self.first.answer)
        self.show(Group.of(sample_groups(self.policy, Addition(), [problem], group_size=len(self.first.texts))))

    def show(self, group: Group) -> None:
        self.group = group
        self.rewards.value = _join(group.rewards)
        self.slider.value = 0
        self.refresh()

    def _read_rewards(self, _) -> None:
        wanted = len(self.group.texts)
        try:
            rewards = torch.tensor([float(word) for word in self.rewards.value.replace(",", " ").split()])
        except ValueError:
            rewards = torch.tensor([])
        if len(rewards) != wanted or not rewards.isfinite().all():
            self.explain(f"{wanted} numbers are wanted, one for each completion, such as {_join(self.first.rewards)}")
            return
        self.group = replace(self.group, rewards=rewards.tolist())
        self.refresh()

    def view(self) -> str:
        i = self.slider.value
        self.back.disabled, self.next.disabled = i == 0, i == self.slider.max
        return self._story(i) + self._table(i) + self._picture(i)

    def static(self) -> str:
        i = max(range(len(self.group.rewards)), key=self.group.rewards.__getitem__)
        return f"<p>{self._summary()}</p>{self._table(None)}{self._picture(i)}"

    def _story(self, i: int) -> str:
        rewards, advantage = self.group.rewards, self.advantages[i]
        so_far = sum(rewards[: i + 1]) / (i + 1)
        return (
            f"<p>Sample {i + 1} of {len(rewards)}: <code>{html.escape(self.group.prompt + self.group.texts[i])}</code>. "
            f"Reward {rewards[i]:g}. Mean so far {so_far:.3f}. {self._summary()} "
            f"Advantage <b>{signed(advantage)}</b>: {direction(advantage)}.</p>"
        )

    def _summary(self) -> str:
        rewards = torch.tensor(self.group.rewards)
        scale, correction = SCALES[self.scale.value]
        std = f", std {rewards.std(correction=correction):.3f}" if scale == "std" else ""
        return f"Whole group: mean {rewards.mean():.3f}{std}."

    def _table(self, marked: int | None) -> str:
        rows = [
            [
                text,
                "right" if text == f"{self.group.answer};" else "wrong",
                f"{reward:g}",
                signed(advantage),
                direction(advantage),
            ]
            for text, reward, advantage in zip(self.group.texts, self.group.rewards, self.advantages)
        ]
        return table_html(["completion", "verifier", "reward", "advantage", "its tokens are"], rows, marked)

    def _picture(self, marked: int) -> str:
        advantages = self.advantages

        def draw(figure):
            axes = figure.add_subplot()
            colors = [BLUE if a > 0 else ORANGE if a < 0 else GRAY for a in advantages]
            bars = axes.bar(range(len(advantages)), advantages, color=colors, alpha=0.45)
            bars[marked].set(alpha=1.0, edgecolor="black", linewidth=1.5)
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(advantages)), self.group.texts, parse_math=False)
            axes.bar_label(bars, [signed(a, 2) for a in advantages], padding=2, fontsize=9)
            axes.margins(y=0.2)
            axes.set(ylabel="advantage")
            axes.spines[["top", "right"]].set_visible(False)

        alt = "Advantages of the group: " + ", ".join(f"{t} {signed(a)}" for t, a in zip(self.group.texts, advantages))
        return figure_html(draw, alt)


def signed(value: float, digits: int = 3) -> str:
    """A number with its sign, and a real minus.

    >>> signed(-0.57722), signed(1.73165), signed(0.0)
    ('−0.577', '+1.732', '0.000')
    """
    return f"{value:.{digits}f}" if value == 0 else f"{value:+.{digits}f}".replace("-", "−")


def direction(advantage: float) -> str:
    """What the update does to a completion's tokens."""
    return "▲ pushed up" if advantage > 0 else "▼ pushed down" if advantage < 0 else "● left alone"


def _join(rewards: Sequence[float]) -> str:
    return " ".join(f"{reward:g}" for reward in rewards)
