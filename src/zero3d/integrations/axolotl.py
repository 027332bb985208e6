"""Stands for `zero3d.ways.axolotl`, for one release, by the name that it had."""

from zero3d.ways.axolotl import Zero3dPlugin as Zero3dPlugin
