"""`python -m opteq`: the command, also under torchrun."""

import sys

from opteq.cli import main

if __name__ == "__main__":
    sys.exit(main())
