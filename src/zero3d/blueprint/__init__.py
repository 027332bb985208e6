"""Decides what every unit of a rank is, once, before anything is allocated: pure arithmetic, no torch.

layout       where each parameter lies in its unit, and where shards are cut
stages       the stage table, and what it allows
policy       settings in which nothing is open any more, and the ranks that units are shared out among
unit         what a unit is: what of it is kept, what comes and goes, what travels and in which dtype
blueprint    all units of a rank as one value, by one function
units        which units there are, their names, and the layout of each
state_spans  what a rank updates, and where which optimizer states lie in it
auto         what auto in offload becomes, by need, room and rates
places       which records of model states leave the device, and how long they are
"""
