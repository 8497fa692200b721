"""Subcommands of `fedq` that study runs. `lightning_fedq.cli` finds them by name."""
