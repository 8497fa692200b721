"""What attacks read off messages, for rows of the near-optimal-utility paper, which has no experiment."""
