"""Large safetensors are closed and opened again while they are read, so that their pages do not pile up."""

import pytest
import torch
from models import hf

from zero3d.models import files, load
from zero3d.shards.boxes import whole


@pytest.mark.parametrize(("limit", "most", "least"), [(files.REOPEN_BYTES, 1, 1), (2_000, 99, 10)])
def test_a_file_is_reopened_after_so_many_bytes_and_reads_the_same(tmp_path, monkeypatch, limit, most, least):
    model = hf("llama")
    model.save_pretrained(tmp_path)
    opened, original = [], files.safe_open
    weights = load.FileWeights(tmp_path, hf("llama").to("meta"))
    weights.close()

    def counted(*given, **options):
        opened.append(given)
        return original(*given, **options)

    monkeypatch.setattr(files, "safe_open", counted)
    monkeypatch.setattr(files, "REOPEN_BYTES", limit)
    for name, p in model.named_parameters():
        rows = p.shape[0] // 2
        for box in (((0, rows), *whole(tuple(p.shape))[1:]), ((rows, p.shape[0]), *whole(tuple(p.shape))[1:])):
            assert torch.equal(weights(name, box), p[box[0][0] : box[0][1]])
    assert least <= len(opened) <= most
