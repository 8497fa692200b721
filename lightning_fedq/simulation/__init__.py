"""Rounds of a federation inside of one Lightning fit: the loops, one client's clock, what comes back."""
