"""Isolation of clients, from outside: nothing here knows how a client is trained."""
