"""What a user would give as data.train: functions that return objects. Runs name them own_data:NAME."""

import numpy
import torch


class Items:
    """Items made by a function of the index."""

    def __init__(self, item, length=10):
        self.item, self.length = item, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.item(index)


def numbered():
    """Item i begins with 0 and its own number."""
    return Items(lambda i: {"input_ids": [0, i, *range(3, 4 + i % 5)]}, 23)


def masked():
    return Items(lambda i: {"input_ids": torch.arange(4), "labels": numpy.array([-100, -100, 2, 3])})


def texts():
    return Items(lambda i: {"text": "abc" * (i + 1)})


def completions():
    return Items(lambda i: {"prompt": "ab", "completion": "cd"})


class Measured(Items):
    lengths = tuple(5 + i % 7 for i in range(40))


def measured():
    return Measured(lambda i: {"input_ids": [0, i, *range(2, Measured.lengths[i])]}, 40)


def raises():
    raise LookupError("no such\nfolder")


def of(item, length=10):
    return lambda: Items(item, length)


def late_nonsense():
    """Good at both ends, where it is looked at before a run."""
    return Items(lambda i: {"input_ids": [1, 2, 3] if i in (0, 9) else [1.5]})


def pictured():
    """Conversations about drawn images."""
    from PIL import Image

    asked = [{"type": "image"}, {"type": "text", "text": "what is it?"}]

    def item(i):
        colour = ("red", "blue")[i % 2]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"a {colour} circle"}]
        return {"images": [Image.new("RGB", (24 + i, 20 + 3 * i), colour)], "messages": turns}

    return Items(item)


generator = lambda: iter([{"text": "a"}])  # noqa: E731
nothing = of(lambda i: {"text": "ab"}, 0)
negative = of(lambda i: {"text": "ab"}, -3)
fraction = of(lambda i: {"text": "ab"}, 2.5)
listed = of(lambda i: [1, 2, 3])
keyless = of(lambda i: {"image": 1})
floats = of(lambda i: {"input_ids": [1.5, 2.0]})
nested = of(lambda i: {"input_ids": [[1, 2]]})
ragged = of(lambda i: {"input_ids": [[1, 2], [1]]})
empty = of(lambda i: {"input_ids": []})
below = of(lambda i: {"input_ids": [1, -2]})
beyond = of(lambda i: {"input_ids": [1, 999]})
unequal = of(lambda i: {"input_ids": [1, 2, 3], "labels": [1, 2]})
odd_labels = of(lambda i: {"input_ids": [1, 2, 3], "labels": [1, -7, 3]})
untaught = of(lambda i: {"input_ids": [1, 2, 3], "labels": [-100] * 3})
no_text = of(lambda i: {"text": 3})
missing_item = of(lambda i: [{"text": "ab"}][i])
not_a_function = 7
