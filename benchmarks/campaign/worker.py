"""The process of one part: `python -m campaign.worker MODULE:FUNCTION FOLDER PLACE`, with benchmarks/ on the path.

It ends with its runner, writes its account in FOLDER/account.json, and shortly before its limit the
stack of every thread on stderr: a part that is killed for hanging has said where.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil

from campaign.account import Account, Place
from campaign.process import STARTED, limit_of

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAST_WORDS_S = 1.0


def main() -> None:
    work, folder, place = sys.argv[1], Path(sys.argv[2]), Place(**json.loads(sys.argv[3]))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    module, _, function = work.partition(":")
    run = getattr(import_module(module), function)
    started = time.time() - psutil.Process().create_time()
    (folder / STARTED).write_text(repr(started))
    faulthandler.dump_traceback_later(max(limit_of(place, started) - started - LAST_WORDS_S, 0.1))
    run(place, Account(folder / "account.json"))


if __name__ == "__main__":
    main()
