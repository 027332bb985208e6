"""The account: what a rank holds and sends, by formula, from an engine's units or a model's shapes. No torch.

states        bytes of parameters, gradients and optimizer states per parameter, and of a unit with its padding
optimizers    which states each optimizer has of which parameters, and how wide they are
transients    bytes of what comes and goes in a step: whole units, reductions, records on their way, scratch
traffic       what operations send, and the formula of the dp axis; other axes have theirs
"""
