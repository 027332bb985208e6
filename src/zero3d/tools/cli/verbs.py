"""The verbs of the command line, and what their `--help` says of them."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """Describes a verb for `--help`: one sentence, and commands with what each does."""

    summary: str
    examples: dict[str, str]

    def epilog(self) -> str:
        """Return the examples as the end of a help text."""
        width = max(map(len, self.examples))
        return "\n".join(["examples:", *(f"  {words:<{width}}  {does}" for words, does in self.examples.items())])


VERBS = {
    "config": Verb(
        "Show what a run would use, explain a key, or print a JSON Schema for editors.",
        {
            "zero3d config show run.yaml": "all keys, and which differ from the defaults",
            "zero3d config explain zero.stage": "what a key means",
            "zero3d config schema": "for completion in an editor",
        },
    ),
    "plan": Verb(
        "Find the fastest layout of a model on a cluster that fits in memory; needs no GPU.",
        {
            "zero3d plan qwen2.5-72b --gpus 128 --gpu a100-80": "the best layouts",
            "zero3d plan explain run.yaml --gpu h100": "memory and time of one file",
            "zero3d plan --theory --params 7.5e9 --gpus 64": "the ZeRO paper's formulas",
        },
    ),
    "calibrate": Verb(
        "Measure this machine's devices, links and disk for `zero3d plan --cluster`; takes about a minute.",
        {
            "zero3d calibrate": "writes cluster.json",
            "zero3d calibrate --ranks 8 --out node.json": "with eight processes",
            "zero3d plan llama-3-8b --cluster cluster.json": "what it is for",
        },
    ),
    "simulate": Verb(
        "Dry-run one step of a configuration without starting its ranks: memory over time, traffic, FLOPs.",
        {
            "zero3d simulate run.yaml --ranks 32": "the peak of every rank",
            "zero3d simulate run.yaml --ranks 32 --html page.html": "as a page with curves",
            "zero3d simulate run.yaml --ranks 32 --rank 5": "rank 5 alone",
        },
    ),
    "train": Verb(
        "Train a model on this machine, or be one rank of a run that a launcher has started.",
        {
            "zero3d train": "the demo, on 2 ranks",
            "zero3d train run.yaml zero.stage=2 --ranks 4": "a file, with a key changed",
            "zero3d train run.yaml --resume auto": "go on from the newest checkpoint",
        },
    ),
    "compare": Verb(
        "Run several settings one after another, and print memory, traffic, time and losses as one table.",
        {
            "zero3d compare zero.stage=0,1,2,3 train.steps=20": "stages, on the demo",
            "zero3d compare run.yaml optimizer.lr=1e-4,3e-4": "two learning rates",
            "zero3d compare run.yaml mesh.dp=1,2 zero.exact=true": "same curve at each dp?",
        },
    ),
    "ckpt": Verb(
        "List, verify, show, compare, export, import or prune checkpoints without starting ranks.",
        {
            "zero3d ckpt ls runs/llama/checkpoints": "what a run saved",
            "zero3d ckpt verify runs/llama/checkpoints": "are they whole?",
            "zero3d ckpt export runs/llama/checkpoints/step-100 hf": "for transformers",
        },
    ),
    "doctor": Verb(
        "Find out what is wrong with this machine, a cluster's hosts or a run that died, and what to type.",
        {
            "zero3d doctor": "this machine",
            "zero3d doctor --hosts node2,node3": "whether other hosts answer",
            "zero3d doctor --run runs/llama": "why a run ended",
        },
    ),
    "report": Verb(
        "Show what a run was, how far it came and how it ended: settings, losses, memory, traffic, versions.",
        {
            "zero3d report zero3d-demo": "the demo, of zero3d train",
            "zero3d report runs/llama": "a run: finished, dead or under way",
            "zero3d report runs/llama --html": "the same as a page, runs/llama/report.html",
            "zero3d report runs/llama --json": "the same as data",
        },
    ),
    "generate": Verb(
        "Continue a text with the model of a run, a checkpoint of any mesh, or an exported folder.",
        {
            'zero3d generate zero3d-demo "def "': "the demo, of zero3d train",
            'zero3d generate runs/llama "What is ZeRO?" --chat': "by its chat template",
            "zero3d generate runs/llama/checkpoints/step-100 A": "one checkpoint",
        },
    ),
    "launch": Verb(
        "Print what starts a run on a cluster: a Slurm script, a Kubernetes manifest or torchrun commands.",
        {
            "zero3d launch slurm run.yaml --nodes 4": "a script for sbatch",
            "zero3d launch k8s run.yaml --nodes 2": "a manifest for kubectl",
            "zero3d launch torchrun run.yaml --nodes 2": "a command for each machine",
        },
    ),
    "models": Verb(
        "Show what a model supports (tp, pp, ep, sp, images, packing, LoRA), without reading its weights.",
        {
            "zero3d models": "the presets",
            "zero3d models models/llama": "a folder with a config.json",
            "zero3d models gpt_oss": "a model_type of transformers",
        },
    ),
    "completion": Verb(
        "Print a script that completes verbs, options and keys in bash, zsh or fish.",
        {
            "zero3d completion bash": 'in ~/.bashrc: eval "$(zero3d completion bash)"',
            "zero3d completion zsh": "to a file _zero3d in a folder of fpath",
            "zero3d completion fish": "in config.fish: zero3d completion fish | source",
        },
    ),
}
