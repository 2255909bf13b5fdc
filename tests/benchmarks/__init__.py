"""Speed and memory, next to TRL: `python -m tests.benchmarks`."""
