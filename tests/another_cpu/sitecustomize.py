"""Noise in processes that tests start as commands: Python imports this first, where `cpus.begin` put this folder on its path.

torch's kernels are replaced when torch has been imported. A process that imports none is left alone: that is tested, too.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


class AfterTorch:
    """A finder of modules that has the noise begin at the end of torch's import."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def load_and_begin(module):
            load(module)
            sys.path.append(str(Path(__file__).parents[1]))
            from cpus import begin_noise

            begin_noise(os.environ)
            sys.path.remove(str(Path(__file__).parents[1]))

        spec.loader.exec_module = load_and_begin
        return spec


sys.meta_path.insert(0, AfterTorch())
