"""Figures and tables of the CPA paper."""
