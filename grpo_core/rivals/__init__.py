"""What GRPO is compared with: each method one file, on the same sampling, log-probs, averaging and evaluation as GRPO.

Each has a frozen dataclass of its own settings and `train_…(task, policy, budget, config)`, which changes the policy in
place and returns a `Ledger`: what it spent, and how good the policy was when it had spent that. The core never imports it.
"""
