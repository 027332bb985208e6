"""Stands for `zero3d.tools.plan.footprint`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import footprint
from zero3d.tools.plan.footprint import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = footprint
