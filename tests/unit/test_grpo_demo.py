"""The demo of GRPO: its task, its rewards, and a loss whose ratio is 1 where the sampler has the trainers' weights."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

DEMO = Path(__file__).parents[2] / "examples" / "grpo_demo"


@pytest.fixture
def demo(monkeypatch):
    """The demo's modules, imported as its own commands do."""
    monkeypatch.syspath_prepend(str(DEMO))
    names = ("sorting", "train", "demo")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import demo
    import sorting
    import train

    yield SimpleNamespace(sorting=sorting, train=train, demo=demo)
    for name in names:
        sys.modules.pop(name, None)


def test_a_reward_is_the_share_of_right_places(demo):
    prompts = torch.tensor([[3, 1, 2, 6]] * 4)
    completions = torch.tensor([[1, 2, 3], [1, 3, 2], [3, 1, 2], [1, 2, 7]])
    assert demo.sorting.rewards(prompts, completions).tolist() == pytest.approx([1, 1 / 3, 0, 2 / 3])
    assert len({tuple(row) for row in demo.sorting.all_prompts().tolist()}) == 216


def test_advantages_are_of_a_group_and_zero_where_all_are_alike(demo):
    size = demo.sorting.GROUP
    rewards = torch.cat([torch.ones(size), torch.linspace(0, 1, size)])
    found = demo.train.advantages(rewards).view(2, size)
    assert torch.equal(found[0], torch.zeros(size))
    assert found[1].mean().item() == pytest.approx(0, abs=1e-6)
    assert found[1].std().item() == pytest.approx(1, abs=1e-2)


def test_a_cache_changes_log_probabilities_by_rounding_alone_and_a_gradient_follows_rewards(demo):
    torch.manual_seed(0)
    model, size = demo.sorting.model(), demo.sorting.GROUP
    prompts = demo.sorting.all_prompts()[torch.tensor([7, 100])].repeat_interleave(size, 0)
    completions, logs = demo.sorting.sample(model, prompts)
    logits = model(input_ids=torch.cat([prompts, completions[:, :-1]], 1)).logits
    loss, ratio = demo.train.grpo(logits, (prompts, completions, logs), 0.0)
    assert ratio <= 1e-5
    assert loss.item() == pytest.approx(0, abs=1e-5)
    loss.backward()
    assert model.lm_head.weight.grad.abs().max() > 0
    _, later = demo.train.grpo(logits * 1.01, (prompts, completions, logs), 0.0)
    assert later > 1e-4


def test_a_picture_is_drawn_of_a_log(demo, tmp_path):
    lines = [
        {"seed": 0, "step": step, "sampling": 0.01, "streaming": 0.01, "exact": step / 4 if step % 2 == 0 else None}
        | ({"training": 0.02, "reward": 0.5, "ratio": 1e-7} if step < 4 else {})
        for step in range(5)
    ]
    demo.demo.picture(lines, tmp_path / "rewards.png")
    assert (tmp_path / "rewards.png").stat().st_size > 5_000
    assert demo.demo.last(lines) == {0: 1.0}
    assert demo.demo.seconds(lines) == pytest.approx({"sampling": 0.05, "streaming": 0.05, "training": 0.08})


def test_a_folder_that_exists_is_left_alone(demo, tmp_path, capsys):
    assert demo.demo.main([str(tmp_path)]) == 2
    assert "remove it, or name another folder" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
