"""What the notebooks show: widgets, figures, exercise checks. `grpo_core` never imports it."""

from grpo_core.lab.group_stepper import RECORDED_GROUP, Group, GroupStepper

__all__ = ["RECORDED_GROUP", "Group", "GroupStepper"]
