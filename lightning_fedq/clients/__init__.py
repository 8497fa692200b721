"""Training of clients: each client runs a separate fit on a copy of the user's training state."""
