"""Stands for `zero3d.tools.plan.theory`, for one release, by the name that it had."""

import sys

from zero3d.tools.plan import theory
from zero3d.tools.plan.theory import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = theory
