"""Federated execution inside a Lightning fit: local training, stacks of clients, clocks, checks, resume."""
