"""Stands for `zero3d.ways.deepspeed.runtime`, for one release, by the name that it had."""

import sys

from zero3d.ways.deepspeed import runtime
from zero3d.ways.deepspeed.runtime import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = runtime
