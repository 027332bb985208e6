"""What a trained model says of held-out images: accuracy by colour and shape, and samples beside their pictures."""

import json
from pathlib import Path

import torch
from PIL import Image
from shapes import QUESTION


def load(folder, adapter=None, open_processor=None):
    """Return a model as anybody would load it, with an adapter of PEFT or without, and its processor.

    open_processor  opens a folder's processor, if transformers' own way is not taken
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    if open_processor is not None:
        return model.eval(), open_processor(folder)
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder, backend="pil")


def answers(loaded, folder, name, batch=64):
    """Yield of each held-out record: its image, what is true, what the model says."""
    model, processor = loaded
    records = json.loads((Path(folder) / f"{name}.json").read_text())
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    for first in range(0, len(records), batch):
        some = records[first : first + batch]
        images = [Image.open(Path(folder) / "images" / record["image"]).convert("RGB") for record in some]
        texts = [prompt] * len(some)
        asked = processor(images=images, text=texts, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            said = model.generate(**asked, max_new_tokens=5, do_sample=False)[:, asked["input_ids"].shape[1] :]
        for record, image, row in zip(some, images, said, strict=True):
            yield image, record["conversations"][1]["value"], processor.decode(row, skip_special_tokens=True).strip()


def accuracy(told):
    """Return the shares of answers with the right colour and with the right shape."""
    words = [(true.split(), (said.split() + [""] * 3)[:3]) for _, true, said in told]
    return tuple(sum(true[i] == said[i] for true, said in words) / len(words) for i in (1, 2))


def picture(told, file, title):
    """Draw pictures with what is said of them, wrong answers in red."""
    from matplotlib.figure import Figure

    columns = 6
    rows = -(-len(told) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.5 * rows), layout="constrained")
    for place, (image, true, said) in zip(figure.subplots(rows, columns).flat, told, strict=False):
        place.imshow(image, interpolation="nearest")
        place.set_title(said or "(nothing)", color="black" if said == true else "crimson", fontsize=11)
        place.set_xlabel("" if said == true else f"is {true}", fontsize=9)
        place.set_xticks([])
        place.set_yticks([])
    figure.suptitle(title, fontsize=13)
    figure.savefig(file, dpi=100)
