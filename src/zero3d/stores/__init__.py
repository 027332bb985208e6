"""Object stores by URL, through fsspec: s3://, gs://, az://, hf://, memory://, file://. No torch.

urls    which paths are URLs, and what their protocols need
store   the objects below a URL, by name: list, read, write, copy, remove
cache   files of stores on this host: fetched once, within a limit

A store has no rename, no lock and no memory map. So what is read comes through the cache, and what is written is
whole once its last object is there. fsspec is imported where there is a URL, and nowhere else.
"""
