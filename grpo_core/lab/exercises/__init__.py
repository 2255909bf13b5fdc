"""The exercises, one file a notebook. Each `check_…` is an `Exercise`: call it with your function."""
