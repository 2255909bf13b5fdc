"""From the toy to real models: GRPO on Hugging Face's causal language models and on word problems.

Optional: it needs `pip install -e ".[real]"`, and nothing else in grpo_core imports it. Left out: anything that GRPO itself
does; the update is `grpo_core.grpo_update`, as for the toy.
"""
