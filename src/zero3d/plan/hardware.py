"""Stands for `zero3d.tools.plan.hardware`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import hardware
from zero3d.tools.plan.hardware import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = hardware
