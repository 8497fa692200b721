"""`python -m lightning_fedq` is the command `fedq`."""

import sys

from lightning_fedq.cli import main

if __name__ == "__main__":
    sys.exit(main())
