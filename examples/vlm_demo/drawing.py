"""The demo's picture: images with what models say of them, and the losses of the same steps, split in four ways."""

from matplotlib.figure import Figure

from zero3d.spec.palette import RUNS, light

STYLES = (
    (light("raw"), 7, "-"),
    (RUNS[3], 4.5, "-"),
    (RUNS[2], 2, "-"),
    ("#101010", 1.2, (0, (2, 2))),
)  # seen together
EQUAL = 1e-9  # where no difference is drawn


def picture(shown, curves, distances, near, file):
    """Draw images and losses into a file.

    shown      of each image: itself, what is true, and what each model says of it, by model
    curves     losses by name, by step
    distances  from the first of them, by name, by step; they must be at most `near`
    """
    figure = Figure(figsize=(12, 9.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.1, 1])
    above.suptitle("Images that no run has seen, and what the model says of them by how it was trained (red: wrong)")
    images, words = above.subplots(2, len(shown) + 1, width_ratios=[0.45] + [1] * len(shown), height_ratios=[1, 0.42])
    _lines(words[0], [(model, "grey") for model in shown[0][2]], 1.0, "right")
    images[0].axis("off")
    for place, said, (image, true, by_model) in zip(images[1:], words[1:], shown, strict=True):
        _image(place, image, true)
        lines = [(told or "(nothing)", "black" if told == true else "crimson") for told in by_model.values()]
        _lines(said, lines, 0.5, "center")
    losses, apart = below.subplots(1, 2)
    for (name, curve), (colour, width, dashes) in zip(curves.items(), STYLES, strict=True):
        steps = range(1, len(curve) + 1)
        losses.plot(steps, curve, color=colour, linewidth=width, linestyle=dashes, label=name)
        if name in distances:
            apart.plot(steps, [max(d, EQUAL) for d in distances[name]], color=colour, marker=".", label=name)
    losses.set(title="the same packed steps, split in four ways", xlabel="step", ylabel="loss")
    apart.axhline(near, color="crimson", linewidth=1)
    apart.text(1, near * 1.15, "above this line the demo fails", color="crimson", fontsize=9)
    apart.set(
        title=f"how far each loss is from that of {next(iter(curves))}", xlabel="step", yscale="log", ylim=(5e-10, 1e-3)
    )
    marks = [10.0**power for power in range(-8, -2)]
    apart.set_yticks([EQUAL, *marks], ["equal", *(f"{mark:.0e}" for mark in marks)])
    apart.minorticks_off()
    losses.legend()
    apart.legend(loc="upper right")
    figure.savefig(file, dpi=100)


def _image(place, image, true):
    """Draw an image in the middle of a square, with what is true of it."""
    width, height = image.size
    side = max(width, height)
    place.imshow(image, interpolation="nearest", extent=(-width / 2, width / 2, -height / 2, height / 2))
    place.set(xlim=(-side / 2, side / 2), ylim=(-side / 2, side / 2), title=true)
    place.axis("off")


def _lines(place, lines, x, alignment):
    """Write lines (text, colour) below each other."""
    place.axis("off")
    for number, (text, colour) in enumerate(lines):
        y = 1 - (number + 0.5) / len(lines)
        place.text(x, y, text, color=colour, fontsize=11, ha=alignment, va="center", transform=place.transAxes)
