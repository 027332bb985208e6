"""Drawn shapes and what is said of them, in LLaVA's format: a JSON list of conversations, and a folder of images."""

import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40),
           "purple": (150, 60, 200), "white": (240, 240, 240)}  # fmt: skip
FIRST, NEW = ("circle", "square", "triangle"), ("star", "cross")
QUESTION = "what is it ?"
SIZES = ((32, 32),)  # pixels: width, height


def draw(colour, shape, numbers, size=SIZES[0]):
    """Draw a shape at a random place, as large as it may be or a little smaller, on a dark ground; return the image."""
    shade = numbers.randint(0, 50)
    image = Image.new("RGB", size, (shade, shade, shade))
    radius = numbers.uniform(0.36, 0.46) * min(size)
    x, y = (numbers.uniform(radius + 1, side - radius - 1) for side in size)
    pen, paint = ImageDraw.Draw(image), COLOURS[colour]
    around = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(around, fill=paint)
    elif shape == "square":
        pen.rectangle(tuple(0.85 * (edge - c) + c for edge, c in zip(around, (x, y, x, y), strict=True)), fill=paint)
    elif shape == "cross":
        arm = 0.3 * radius
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=paint)
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=paint)
    else:
        corners = 3 if shape == "triangle" else 10
        lengths = (1.0,) if shape == "triangle" else (1.0, 0.42)
        turns = [2 * math.pi * i / corners - math.pi / 2 for i in range(corners)]
        reach = [radius * lengths[i % len(lengths)] for i in range(corners)]
        points = [(x + r * math.cos(t), y + r * math.sin(t)) for r, t in zip(reach, turns, strict=True)]
        pen.polygon(points, fill=paint)
    return image


def save(folder, name, shapes, count, seed, sizes=SIZES):
    """Draw `count` images, in these sizes by turns, below folder/images, and write their conversations to NAME.json."""
    folder, numbers, records = Path(folder), random.Random(seed), []
    (folder / "images" / name).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        colour, shape = numbers.choice(list(COLOURS)), numbers.choice(shapes)
        path = f"{name}/{i}.png"
        draw(colour, shape, numbers, sizes[i % len(sizes)]).save(folder / "images" / path)
        turns = [{"from": "human", "value": f"<image>\n{QUESTION}"}, {"from": "gpt", "value": f"a {colour} {shape}"}]
        records.append({"id": f"{name}-{i}", "image": path, "conversations": turns})
    (folder / f"{name}.json").write_text(json.dumps(records, indent=1))
