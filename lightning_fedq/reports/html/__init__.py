"""One HTML page about one or several runs, which needs nothing else to be read. No Lightning in here."""
