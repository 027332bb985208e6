"""Axolotl's runs on our engine: a plugin, named in its YAML.

    plugins: [zero3d.integrations.axolotl.Zero3dPlugin]
    zero3d_stage: 3

plugin.py      the plugin
arguments.py   the keys that it adds to a file of Axolotl's

Of its package's metadata Axolotl 0.19 takes transformers 5.16 alone; ours needs 5.17 or newer.
"""

from zero3d.integrations.axolotl.plugin import Zero3dPlugin

__all__ = ["Zero3dPlugin"]
