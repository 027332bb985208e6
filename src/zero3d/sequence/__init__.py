"""The sequence axis: the ranks of an sp group have a part of each sequence, and the bits of a rank that has all of it.

                     whole micro-batch, on every rank of the group
    entry.py         the language model's entry: each rank goes on with its rows; masks are made of the whole sequence
    positions.py     positions of a sequence that comes without them, as the decoder would make them
    attention.py     rows x all heads -> all-to-all -> all rows x some heads -> attention -> all-to-all -> rows again
    mixers.py        convolutions behind a halo, recurrences by heads: the same for layers that are no attention
    prefix.py        or by states that pass from rank to rank
    choice.py        which of the two takes less, by what travels and what is scanned (no torch)
    exchange.py      what ranks pass each other of rows, with gradients
    blocks.py        what attends where a mask is too large to be made: by ends of documents, or in blocks
    loss.py          losses of this rank's rows, and the mean over all labels of the group; what else losses are made of
    group.py         puts these into a model, and takes them out again for generation
    shares.py        which rows and which heads a rank has; what travels, by formula (no torch)

    sp 2, 4 heads    rank 0                  rank 1
    outside          rows 0-3, heads 0-3     rows 4-7, heads 0-3
    in attention     rows 0-7, heads 0-1     rows 0-7, heads 2-3

Attention by heads is DeepSpeed-Ulysses (arXiv 2309.14509): heads do not mix in attention, so each is computed as it
would be on one rank. Everything else in a decoder works on rows. Weights know nothing of it: sp folds dp, over which
they are sharded and their gradients summed.
"""
