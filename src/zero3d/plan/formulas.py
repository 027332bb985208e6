"""Stands for `zero3d.tools.plan.formulas`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import formulas
from zero3d.tools.plan.formulas import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = formulas
