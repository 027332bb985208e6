"""Stands for `zero3d.tools.plan.shapes`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import shapes
from zero3d.tools.plan.shapes import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = shapes
