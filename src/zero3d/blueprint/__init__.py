"""Decides what every unit of a rank is, once, before anything is allocated: pure arithmetic, no torch.

layout       where each parameter lies in its unit, and where shards are cut
stages       the stage table, and what it allows
policy       settings in which nothing is open any more, and the ranks that units are shared out among
unit         what a unit is: what of it is kept, what comes and goes, what travels and in which dtype
blueprint    all units of a rank as one value, by one function
units        the list of units, with the name and the layout of each
state_spans  a rank's updated part of a unit, and the span of each optimizer state in it
auto         the choice for auto in offload, by need, room and rates
places       the records of model states that leave the device, and their lengths
"""
