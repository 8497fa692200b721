"""Self-contained HTML page about one or several runs. The package does not use Lightning."""
