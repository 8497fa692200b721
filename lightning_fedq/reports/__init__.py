"""Outputs of a run: tables, files, pictures, and the page of `fedq report`."""
