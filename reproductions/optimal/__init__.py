"""Near-optimal utility under a leakage budget: its theorems by number; the paper has no experiment."""
