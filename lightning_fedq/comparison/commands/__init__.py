"""Subcommand of `fedq` about many runs. `lightning_fedq.cli` finds it by name."""
