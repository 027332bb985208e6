"""Axolotl's runs on our engine: a plugin, named in its YAML.

    plugins: [zero3d.ways.axolotl.Zero3dPlugin]
    zero3d_stage: 3

plugin.py   the plugin, and the keys that it adds to a file of Axolotl's

Axolotl 0.21 pins transformers 5.20.1 and needs torch 2.13 or newer, both of which zero3d takes.
"""

from zero3d.ways.axolotl.plugin import Zero3dPlugin

__all__ = ["Zero3dPlugin"]
