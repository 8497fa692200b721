"""Many runs: compared, on equal tasks, and what all of them cost together. Nothing outside imports it."""
