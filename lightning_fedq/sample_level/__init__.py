"""Sample-level privacy by DP-SGD: Poisson batches, accounts of samples, and what DP-SGD refuses."""
