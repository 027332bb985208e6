"""`python -m zero3d.watchdog FOLDER RANKS`: watch the ranks of this host that another launcher started."""

from __future__ import annotations

import sys
from pathlib import Path

from zero3d.watchdog.joined import watch

if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
