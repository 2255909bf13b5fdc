"""ValueMeter: the group's mean beside the exact value of each prompt, for groups of any size."""

from collections.abc import Sequence

import ipywidgets as W
import torch
from torch import Tensor

from grpo_core.evaluate import success_probability
from grpo_core.lab.panel import BLUE, GRAY, ORANGE, Panel, button, figure_html, table_html
from grpo_core.rollout import sample_groups
from grpo_core.task import Addition, Problem
from grpo_core.warm_start import warm_start

SIZES = (2, 4, 8, 16, 32)


class ValueMeter(Panel):
    """A slider for the group size G, and a button that asks the policy all over again.

    One question is asked 32 times; a group of G is the first G answers. So the slider adds answers to the same group.

    Args:
        problems: whose values are estimated; 24 validation problems by default, few enough to be asked at once.
        policy: what is asked; the start policy by default.
        temperature: of the sampling; the exact value is computed at the same one.
    """

    def __init__(self, problems: Sequence[Problem] = (), policy=None, temperature: float = 0.7):
        self.task, self.policy = Addition(), warm_start() if policy is None else policy
        self.temperature, self.generator = temperature, torch.Generator().manual_seed(0)
        problems = list(problems) or self.task.validation[:24]
        values = success_probability(self.policy, self.task, problems, temperature)
        order = values.argsort()
        self.problems, self.values = [problems[i] for i in order.tolist()], values[order]
        self.asked: list[Tensor] = []  # One (problems, 32) table of rewards for each time that the policy was asked.
        self.group_size = W.SelectionSlider(options=SIZES, value=8, description="G", continuous_update=False)
        self.again = button("ask again", self.ask_again, "ask each question 32 more times")
        self.group_size.observe(self.refresh, "value")
        self.ask()
        super().__init__([[self.group_size, self.again]], height=500)

    def ask(self) -> None:
        rollout = sample_groups(self.policy, self.task, self.problems, max(SIZES), self.temperature, generator=self.generator)
        self.asked.append(rollout.rewards)

    def ask_again(self) -> None:
        self.ask()
        self.refresh()

    def view(self) -> str:
        size, rewards = self.group_size.value, self.asked[-1]
        error, batch = rmse(group_means(rewards, size), self.values), rmse(rewards[:, :size].mean(), self.values)
        times = "once" if len(self.asked) == 1 else f"{len(self.asked)} times"
        verdict = "closer than" if error < batch else "no closer than"
        story = (
            f"<p>G = {size}, asked {times}. The group's mean misses a prompt's value by <b>{error:.3f}</b> (root mean square). "
            f"It is {verdict} the batch's mean, which misses by {batch:.3f}.</p>"
        )
        return story + self._picture(size) + self._table(size)

    def _table(self, marked: int) -> str:
        rows = []
        for size in SIZES:
            errors = torch.tensor([rmse(group_means(rewards, size), self.values) for rewards in self.asked])
            typical = errors.square().mean().sqrt()
            rows.append([f"{size}", f"{errors[-1]:.3f}", f"{typical:.3f}", f"{expected_rmse(self.values, size):.3f}"])
        header = ["G", "error this time", "error over all times", "theory √(p(1 − p)/G)"]
        return table_html(header, rows, SIZES.index(marked))

    def _picture(self, size: int) -> str:
        means, batch = group_means(self.asked[-1], size), self.asked[-1][:, :size].mean().item()

        def draw(figure):
            axes, x = figure.add_subplot(), range(len(means))
            axes.vlines(x, self.values, means, color=GRAY, linewidth=1)
            axes.plot(x, self.values, "k_", markersize=11, markeredgewidth=2, label="exact value")
            axes.plot(x, means, "o", color=BLUE, label=f"mean of {size} answers")
            axes.axhline(batch, color=ORANGE, linestyle="--", linewidth=1.2, label="mean over the batch")
            axes.set(ylim=(-0.05, 1.05), ylabel="chance of a right answer")
            axes.set_xticks(x, [problem.prompt[:-1] for problem in self.problems], rotation=90, fontsize=7)
            axes.legend(frameon=False, fontsize=8, loc="upper left")
            axes.spines[["top", "right"]].set_visible(False)

        pairs = (f"{q.prompt} {v:.2f}, {m:.2f}" for q, v, m in zip(self.problems, self.values.tolist(), means.tolist()))
        alt = f"Exact value and mean of {size} answers, prompt by prompt: " + "; ".join(pairs)
        return figure_html(draw, alt, size=(7.4, 3.0))


def group_means(rewards: Tensor, size: int) -> Tensor:
    """(prompts,) mean of the first `size` answers to each question."""
    return rewards[:, :size].mean(dim=1)


def rmse(estimate: Tensor, values: Tensor) -> float:
    """Root of the mean squared error.

    >>> round(rmse(torch.tensor([0.0, 1.0]), torch.tensor([0.3, 0.6])), 4)
    0.3536
    """
    return (estimate - values).square().mean().sqrt().item()


def expected_rmse(values: Tensor, size: int) -> float:
    """What theory expects of the mean of `size` answers that are right with probability p: the root of mean p(1 − p)/size.

    >>> round(expected_rmse(torch.tensor([0.5, 0.5]), 25), 4)
    0.1
    """
    return (values * (1 - values) / size).mean().sqrt().item()
