"""Clients that lie: attacks, robust rules, and how many a report counts."""
