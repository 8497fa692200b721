"""The bench: mechanisms at equal epsilon, on equal tasks, tuned by one rule. `fedq bench` runs it."""
