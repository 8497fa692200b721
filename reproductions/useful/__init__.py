"""What a client-level epsilon costs in accuracy, adversary by adversary."""
