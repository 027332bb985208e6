"""Lightning's Trainer on our engine: `Trainer(strategy="zero3d_3")` after `import zero3d.ways.lightning`.

strategy.py     a Strategy, registered for each stage as zero3d_0, zero3d_1, zero3d_2 and zero3d_3
checkpoints.py  its checkpoints as plain Lightning reads them: `load_from_checkpoint` takes them, too
averaging.py    callbacks that average weights find them whole
"""

from zero3d.ways.lightning.checkpoints import let_load
from zero3d.ways.lightning.strategy import Zero3dStrategy, register

__all__ = ["Zero3dStrategy"]

register()
let_load()
