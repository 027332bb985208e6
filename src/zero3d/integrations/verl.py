"""Stands for `zero3d.ways.verl`, for one release, by the name that it had."""

import sys

from zero3d.ways import verl
from zero3d.ways.verl import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = verl
