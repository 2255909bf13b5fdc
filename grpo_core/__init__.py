"""GRPO from scratch: a thin module that is meant to be read.

The names below come in the order in which the notebooks introduce them; each lives in the small file named after its idea.
"""

from grpo_core.task import Addition, Problem
from grpo_core.policy import TinyGPT
from grpo_core.warm_start import warm_start
from grpo_core.rollout import Rollout, sample_groups, token_log_probs
from grpo_core.evaluate import Estimate, greedy_accuracy, pass_at_k, success_probability
from grpo_core.advantages import flat_group_probability, flat_groups, group_advantages, leave_one_out_advantages
from grpo_core.surrogate import clip_fraction, clipped_surrogate, ratio
from grpo_core.kl import kl_estimate
from grpo_core.config import GRPOConfig
from grpo_core.grpo import aggregate, grpo_loss, grpo_update, train
from grpo_core.checkpoint import CheckpointError
from grpo_core.history import History, TrainingDiverged

__all__ = [
    "Addition", "Problem", "TinyGPT", "warm_start", "Rollout", "sample_groups", "token_log_probs", "Estimate",
    "greedy_accuracy", "pass_at_k", "success_probability", "group_advantages", "leave_one_out_advantages", "flat_groups",
    "flat_group_probability", "ratio", "clipped_surrogate", "clip_fraction", "kl_estimate", "GRPOConfig", "aggregate",
    "grpo_loss", "grpo_update", "train", "History", "TrainingDiverged", "CheckpointError",
]  # fmt: skip
