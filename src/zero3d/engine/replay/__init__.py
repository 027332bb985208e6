"""health.replay: a micro-batch computed twice, so that a machine that miscalculates is found before it spoils weights.

In every K-th step, of one micro-batch (of another one each time):

    1. neighbours over dp trade it, with everything else that its forward depends on, except the weights
    2. each computes the other's, forward and backward, and keeps sums of the bits of every gradient; nothing else of
       it stays: random states, buffers, counts, gradients and traffic are as if it had not been
    3. each computes its own, as in any step, and looks at the gradients as autograd hands them over
    4. before the update the sums are traded and compared: one read of the device

In a pipeline the random states before a micro-batch's forward are known when it comes: 3 is first, and then all stages
of a dp rank compute the neighbour's micro-batch, alone in the schedule. The outputs of model chunks are hashed, too:
the error then names the stage on which a fault began, and not the stages that it reached.

Where a bit differs, a third dp rank and the two compute that micro-batch once more. A rank that gives two results for
it is the culprit; else two results that agree are right. At stage 3 all ranks gather the same units in the same order,
so all of them compute something each time, and the tp ranks of a model-parallel group always the same.

verdict     who computes whose micro-batch, and who is wrong; no tensors
hashes      sums of the bits of gradients
inputs      a micro-batch with random states and buffers, here and from another rank
recordings  a micro-batch on its way through a rank's part of the model: in a step, and again
replay      the above
"""
