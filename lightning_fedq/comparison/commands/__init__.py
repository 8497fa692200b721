"""Subcommands of `fedq` about many runs. `lightning_fedq.cli` finds them by name."""
