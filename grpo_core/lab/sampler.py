"""Sampler: ask the policy any sum, several times, and see how sure it was of each character that it wrote."""

import re

import ipywidgets as W
import torch

from grpo_core.lab.panel import BLUE, GRAY, Panel, button, figure_html, table_html
from grpo_core.rollout import Rollout, sample_groups
from grpo_core.task import Addition, Problem
from grpo_core.warm_start import warm_start

SHOWN = 5  # Candidates in each picture: the others hardly ever have a visible bar.


class Sampler(Panel):
    """A box for a sum, a temperature, and a button that asks again. Eight completions with verdicts are shown.

    Args:
        prompt: the first sum.
        policy: what is asked; the start policy by default.
        temperature: the first temperature.
    """

    def __init__(self, prompt: str = "24+48=", policy=None, temperature: float = 0.7):
        self.task, self.policy = Addition(), warm_start() if policy is None else policy
        self.trained_on = set(self.task.train)
        self.seed = 0  # Of the draws: the slider keeps it, so that only the temperature changes; "ask again" moves on.
        self.text = W.Text(value=prompt, description="sum", continuous_update=False)
        self.temperature = W.FloatSlider(
            value=temperature,
            min=0.1,
            max=2.0,
            step=0.1,
            description="temperature",
            continuous_update=False,
            style={"description_width": "90px"},
        )
        self.again = button("ask again", self.ask_again, "eight new completions")
        for control in (self.text, self.temperature):
            control.observe(self.refresh, "value")
        super().__init__([[self.text, self.again], [self.temperature]], height=500)

    def ask_again(self) -> None:
        self.seed += 1
        self.refresh()

    def view(self) -> str:
        problem = read_sum(self.text.value, self.task)
        generator = torch.Generator().manual_seed(self.seed)
        rollout = sample_groups(self.policy, self.task, [problem], temperature=self.temperature.value, generator=generator)
        self.rollout, self.steps = rollout, token_probabilities(self.policy, self.task, rollout)
        return self._summary(problem) + self._table(problem) + self._picture(problem)

    def _summary(self, problem: Problem) -> str:
        right = int(self.rollout.rewards.sum())
        if problem in self.trained_on:
            seen = "this sum is in the training part"
        else:
            seen = "this sum was never trained on" if two_digits(problem) else "the policy was only taught two-digit numbers"
        return (
            f"<p><code>{problem.prompt}</code> at temperature {self.rollout.temperature:.1f}: {right} of 8 right. "
            f"The true answer is {problem.answer}; {seen}.</p>"
        )

    def _table(self, problem: Problem) -> str:
        texts, mask = self.rollout.texts, self.rollout.completion_mask
        log_probs = torch.where(mask, self.rollout.old_log_probs, 0.0).sum(dim=1).tolist()
        rows = [
            [text, verdict(text, problem.answer), f"{log_prob:.2f}".replace("-", "−"), f"{torch.tensor(log_prob).exp():.3f}"]
            for text, log_prob in zip(texts, log_probs)
        ]
        return table_html(["completion", "verifier", "log-prob", "probability"], rows, marked=0)

    def _picture(self, problem: Problem) -> str:
        """One small chart for each character of the first completion: the likeliest candidates, the drawn one in blue."""

        def draw(figure):
            for i, (written, drawn, candidates) in enumerate(self.steps):
                axes = figure.add_subplot(1, self.task.max_new_tokens, i + 1)
                names, chances = zip(*reversed(candidates))
                bars = axes.barh(range(len(names)), chances, color=[BLUE if name == drawn else GRAY for name in names])
                axes.bar_label(bars, [f"{chance:.2f}" for chance in chances], padding=2, fontsize=8)
                axes.set_yticks(range(len(names)), [f"▶ {name}" if name == drawn else name for name in names])
                axes.set(xlim=(0, 1.35), xticks=[])
                axes.set_title(f"after {problem.prompt}{written}", fontsize=9)
                axes.spines[["top", "right", "bottom"]].set_visible(False)

        said = [
            f"after {problem.prompt}{written} " + ", ".join(f"{name} {chance:.2f}" for name, chance in candidates)
            for written, _, candidates in self.steps
        ]
        alt = f"Probabilities of the characters of {self.rollout.texts[0]}: " + "; ".join(said)
        caption = (
            "<p>The first completion, one character at a time: how likely each candidate was, and which was drawn (▶).</p>"
        )
        return caption + figure_html(draw, alt, size=(7.4, 1.9))


def read_sum(text: str, task: Addition) -> Problem:
    """The problem that a reader typed; a ValueError says in words what is wrong with it.

    >>> read_sum(" 24 + 48 ", Addition())
    Problem(prompt='24+48=', answer='72')
    """
    prompt = text.replace(" ", "").removesuffix("=") + "="
    unknown = " ".join(dict.fromkeys(character for character in prompt if character not in task.vocab))
    if unknown:
        raise ValueError(f"the policy cannot read {unknown} : its whole alphabet is {task.vocab}")
    terms = re.fullmatch(r"(\d+)\+(\d+)=", prompt, re.ASCII)
    if terms is None:
        raise ValueError(f"{text!r} is not a sum of two numbers: type one such as {task.example.prompt}")
    if max(map(len, terms.groups())) > 4:
        raise ValueError(f"{text!r} is too long for this policy's context: four digits a number fit, and it was taught two")
    return Problem(prompt, str(sum(map(int, terms.groups()))))


def two_digits(problem: Problem) -> bool:
    """Whether a sum is of the kind that the policy was taught.

    >>> two_digits(Problem("24+48=", "72")), two_digits(Problem("100+5=", "105")), two_digits(Problem("04+48=", "52"))
    (True, False, False)
    """
    return all(10 <= int(term) <= 99 and len(term) == 2 for term in problem.prompt.removesuffix("=").split("+"))


def verdict(text: str, answer: str) -> str:
    """The verifier's decision, with the reason where it is not the digits.

    >>> verdict("72;", "72"), verdict("73;", "72"), verdict("7212", "72")
    ('✓ right', '✗ wrong', '✗ never ended')
    """
    if not text.endswith(";"):
        return "✗ never ended"
    return "✓ right" if text == f"{answer};" else "✗ wrong"


@torch.no_grad()
def token_probabilities(policy, task, rollout: Rollout) -> list[tuple[str, str, list[tuple[str, float]]]]:
    """For each character of the first completion: what stood before it, the one drawn, and the likeliest candidates.

    The drawn one is always among the candidates, whatever its rank.
    """
    text = rollout.texts[0]
    token_ids = torch.cat([rollout.prompt_ids[:1], rollout.completion_ids[:1]], dim=1)
    logits = policy(token_ids)[0, rollout.prompt_ids.shape[1] - 1 : -1] / rollout.temperature
    steps = []
    for i, chances in enumerate(logits.softmax(dim=-1)[: len(text)]):
        order = sorted(range(len(chances)), key=lambda token: -chances[token].item())
        kept = order[:SHOWN]
        drawn = task.vocab.index(text[i])
        if drawn not in kept:
            kept[-1] = drawn
        steps.append((text[:i], text[i], [(task.vocab[token], chances[token].item()) for token in kept]))
    return steps
