"""Stands for `zero3d.ways.lightning`, for one release, by the name that it had."""

from zero3d.ways.lightning import Zero3dStrategy as Zero3dStrategy
