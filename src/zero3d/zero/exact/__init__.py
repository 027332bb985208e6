"""exact=True: the same bits at any number of data-parallel ranks.

The micro-batches of a step are one global list; each gives a *summand* to every sum over them (gradients, losses,
weights). A summand's number is its micro-batch's index in that list. A sum is one binary tree over the list, whatever
the number N of ranks:

    summand 0   1   2   3   4   5   6   7          reduce every micro-batch   rank r's k-th is summand k N + r
             \\ /     \\ /     \\ /     \\ /             reduce every step          rank r's k-th is summand r M + k
              01      23      45      67
                \\    /          \\    /              a list that is not a power of two long is filled up with zeros:
                 0123            4567              what is left over is added from small to large
                     \\          /
                       01234567

                        summands of one rank                 summands of several ranks
    every micro-batch   2nd: a `Counter` of shards           1st: all_to_all, then `add_tree` over the N terms
    every step          1st: a `Counter` of whole buffers    2nd: the same

A summand travels in the dtype of its backward, sums in that of masters. N must be a power of two that divides 64,
the cells of the layout's grid: then vector tails, padding and pieces of checkpoints are the same for every such N.
The norm is that of 64 norms, one of each cell of all units; dropout's seed follows from the number of the summand.
Matrix products depend on their shapes, so the size of a micro-batch, tp and pp must stay as they are.

summands     which micro-batch is which summand; seeds, losses and weights that follow from the number
sums         the tree over several tensors at once, and over tensors that come one after another
gradients    a unit's gradients, summed in the tree
optimizer    the step: weights in the tree, the norm over a fixed grid
"""
