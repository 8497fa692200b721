"""Figures and claims of the paper on compression with exact error distribution."""
