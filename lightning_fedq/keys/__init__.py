"""Who knows which bits: streams of random words, keys, key agreement."""
