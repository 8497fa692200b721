"""A change to a text that a test is about."""


def changed(text, *changes):
    """Replace old by new, for pairs of them. What is nowhere in the text would change nothing, and fails."""
    for old, new in changes:
        assert old in text, f"there is no {old!r} to change"
        text = text.replace(old, new)
    return text
