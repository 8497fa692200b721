"""Byzantine clients: attacks, robust rules, and the number that a report counts."""
