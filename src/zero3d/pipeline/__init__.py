"""Pipeline parallelism: the layers of a model cut into chunks over the pp axis, run by torch's schedules.

schedules          which rank has which model chunks, by schedule; what fits it
balance            where to cut: blocks by bytes and FLOPs
split              a model chunk that runs by the model's own forward
entry              what later chunks are given beside the hidden state
stages_trial       whether a model's stages give what the whole does, and what they must be given for it
ties               parameters that two chunks hold
actions            a schedule's action list, and how long ranks wait in it
traffic            what a rank sends and gathers in a step, by formula
acknowledgements   when a rank knows that what it sent has arrived

runner             training steps, evaluation and generation through the chunks
chunks             this rank's chunks, run by number on what a micro-batch holds for them
shapes             shapes of what leaves each chunk
step               what torch's stages call in a training step
stage              a chunk as torch's schedules drive it
messages           what is sent, and buffers to receive into, for as long as they are needed
forward_only       one micro-batch through all chunks, without a schedule
failures           what follows when a rank fails

The planner imports schedules, balance, actions, traffic and acknowledgements, which import no torch.
"""
