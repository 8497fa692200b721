"""A client's training: a fit of its own on a copy of everything that the user's fit holds."""
