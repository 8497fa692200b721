"""Outputs of a run: tables and files, and the page of `fedq report`."""
