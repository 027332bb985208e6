"""Weights on their way from training to whoever serves them, tensor by tensor, each with a checksum.

buckets   flat memory filled with tensors, whole or in parts, and what makes tensors of it again
protocol  a stream: what a sender and its receivers say to each other, and when
local     carries it to processes of the same host, through memory that both share
group     carries it to other jobs and hosts, over a process group of gloo or NCCL
connect   the receiver of an address

A folder takes them, too (checkpoint/streamed_folder.py). An engine makes the buckets (`Engine.stream_weights`,
engine/streaming.py). A server needs nothing of it:

    with zero3d.weights.connect("/run/weights") as sender:
        while serving:
            for name, tensor in sender.receive():
                parameters[name].copy_(tensor)
"""

from zero3d.weights.buckets import Bucket as Bucket, Part as Part, whole as whole
from zero3d.weights.connect import connect as connect, receive as receive
from zero3d.weights.group import GroupSender as GroupSender
from zero3d.weights.local import LocalSender as LocalSender
from zero3d.weights.protocol import Receiver as Receiver

__all__ = ["Bucket", "GroupSender", "LocalSender", "Part", "Receiver", "connect", "receive", "whole"]
