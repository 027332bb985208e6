"""Training data, from files to the micro-batches of a rank.

fetched.py   URLs of object stores -> files of this host
files.py     paths -> files and their formats
records.py   files -> text, prompt + completion, chat, rows of ids
chat_keys.py what a chat has beside its texts
encode.py    records -> tokens and targets     (tokenizers.py, chat.py)
borders.py   which tokens lie behind a border of a text
store.py     ... kept on disk, memory-mapped
packing.py   documents -> spans -> sequences
sequences.py sequences -> tensors
images.py    a model's processor: images -> tokens, pixels (image_rules.py: what its outputs belong to;
             processor_sizes.py: how many pixels its settings make)
own.py       a user's own function -> the same
mixture.py   several sources -> one, with weights
orders.py    the order of a run
batches.py   sequences -> micro-batches of a rank
dataset.py   all of it from a configuration's section `data`

Whether a model keeps packed documents apart is models/packing.py's question.
"""
