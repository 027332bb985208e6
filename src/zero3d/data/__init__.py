"""Training data, from files to the micro-batches of a rank.

files.py     paths -> files and their formats
records.py   files -> text, prompt + completion, chat, rows of ids
encode.py    records -> tokens and targets     (tokenizers.py, chat.py)
store.py     ... kept on disk, memory-mapped
packing.py   documents -> segments -> sequences
sequences.py sequences -> tensors
batches.py   sequences -> the order of a run -> micro-batches of a rank
masking.py   does the model keep packed documents apart?
dataset.py   all of it from a configuration's section `data`
"""
