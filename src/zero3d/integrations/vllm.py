"""Stands for `zero3d.ways.vllm`, for one release, by the name that it had."""

import sys

from zero3d.ways import vllm
from zero3d.ways.vllm import *  # noqa: F403 - for editors and type checkers

sys.modules[__name__] = vllm
