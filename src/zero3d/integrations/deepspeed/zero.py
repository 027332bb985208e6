"""Stands for `zero3d.ways.deepspeed.zero`, for one release, by the name that it had."""

import sys

from zero3d.ways.deepspeed import zero
from zero3d.ways.deepspeed.zero import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = zero
