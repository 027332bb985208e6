"""Stands for `zero3d.tools.cli.main`, for one release: installed commands import it, and `python -m` runs it."""

import sys

from zero3d.tools.cli.main import main as main

if __name__ == "__main__":
    sys.exit(main())
