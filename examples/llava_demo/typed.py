"""Runs `zero3d train` as one would type it."""

import subprocess
import sys


def train(folder, run, *overrides, log=None):
    """Run `zero3d train RUN.yaml` on 2 ranks in `folder`; what it says goes to the screen, or to a `log` there.

    Raises CalledProcessError where the run fails.
    """
    typed = ["train", f"{run}.yaml", "--ranks", "2", *overrides]
    print(f"\n$ cd {folder} && zero3d {' '.join(typed)}{f' > {log} 2>&1' if log else ''}", flush=True)
    command = [sys.executable, "-m", "zero3d.tools.cli.main", *typed]
    if log is None:
        subprocess.run(command, cwd=folder, check=True)
        return
    with (folder / log).open("w") as file:
        subprocess.run(command, cwd=folder, check=True, stdout=file, stderr=subprocess.STDOUT)
