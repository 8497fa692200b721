def corbin_exp7() -> None:
    """x."""
