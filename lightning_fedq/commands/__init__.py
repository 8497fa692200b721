"""Subcommands of `fedq`, one per file. `lightning_fedq.cli` chooses between them."""
