"""Keys, key agreement and random streams, by the parties that know them."""
