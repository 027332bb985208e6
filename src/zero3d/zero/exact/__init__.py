"""exact=True: the same bits at any number of data-parallel ranks.

The micro-batches of a step are one global list, its *leaves*. Everything that is summed over them (gradients,
losses, weights) is summed in one binary tree over that list, whatever the number N of ranks:

    leaf    0   1   2   3   4   5   6   7          reduce every micro-batch   rank r's k-th is leaf k N + r
             \\ /     \\ /     \\ /     \\ /             reduce every step          rank r's k-th is leaf r M + k
              01      23      45      67
                \\    /          \\    /              a list that is no power of two long is filled up with zeros:
                 0123            4567              what is left over is added from small to large
                     \\          /
                       01234567

                        leaves of one rank                   leaves of several ranks
    every micro-batch   2nd: a `Counter` of shards           1st: all_to_all, then `add_tree` over the N parts
    every step          1st: a `Counter` of whole buffers    2nd: the same

A leaf travels in the dtype of its backward, sums in that of masters. N must be a power of two that divides the
layout's 64 segments: then vector tails, padding and pieces of checkpoints are those of every other such N. The norm
is that of 64 norms, one of each segment of all units; dropout's seed follows from the number of the leaf. Matrix
products depend on their shapes, so the size of a micro-batch, tp and pp must stay as they are.

summands     which micro-batch is which summand; seeds, losses and weights that follow from the number
sums         the tree over several tensors at once, and over tensors that come one after another
gradients    a unit's gradients, summed in the tree
optimizer    the step: weights in the tree, the norm over a fixed grid
"""
