"""`fedq audit`. `lightning_fedq.cli` finds it by name."""
