"""The subcommands of `fedq`, one a file. `lightning_fedq.cli` chooses between them."""
