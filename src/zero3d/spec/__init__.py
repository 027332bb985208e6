"""Declares the sections of a run once, for files, for keywords of an Engine, and for plans. No torch.

zero      what data-parallel ranks shard, and how gradients are reduced
mesh      degrees, and how pipeline, tensor and expert parallelism divide a model
offload   what leaves the device
sections  all of them as one record, and settings put into the section that declares them
rules     what settings cannot be together, once for files, engines and plans
tiers     a row for each place off the device: what may be kept there, its records, where it counts, how fast it is
optimizer a row for each that a file may ask for: states, options, bytes that a step touches, what builds it
declaring how a key says its default, meaning and range
bits      why the bits of a run change with a key, or with what several keys come to
dtypes    dtypes by name and width
sizes     bytes as people write them
text      bytes, counts and columns as reports print them
palette   the colours of all pictures and pages
"""

from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.zero import PRECISIONS, Zero

__all__ = ["PRECISIONS", "Mesh", "Offload", "Zero"]
