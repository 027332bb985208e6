"""Weights on their way from training to whoever serves them, tensor by tensor, each with a checksum.

buckets   flat memory filled with tensors, whole or in parts, and what makes tensors of it again
local     to processes of the same host, through memory that both share

An engine makes the buckets (`Engine.stream_weights`, engine/streaming.py). A server needs nothing of it:

    with zero3d.weights.connect("/run/weights") as sender:
        while serving:
            for name, tensor in sender.receive():
                parameters[name].copy_(tensor)
"""

from zero3d.weights.buckets import Bucket as Bucket, Part as Part
from zero3d.weights.local import (
    LocalSender as LocalSender,
    Receiver as Receiver,
    connect as connect,
    receive as receive,
)

__all__ = ["Bucket", "LocalSender", "Part", "Receiver", "connect", "receive"]
