"""Federated, private and cheap on the wire: one callback for PyTorch Lightning."""
