"""`python -m zero3d VERB ...`: the command `zero3d`."""

import sys

from zero3d.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
