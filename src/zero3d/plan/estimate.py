"""Stands for `zero3d.tools.plan.estimate`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import estimate
from zero3d.tools.plan.estimate import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = estimate
