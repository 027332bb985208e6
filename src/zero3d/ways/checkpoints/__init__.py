"""Checkpoints of other trainers as ours: weights, masters and Adam's moments; `zero3d ckpt import`.

foreign      what is taken of any of them, and that as a checkpoint of ours
deepspeed    DeepSpeed's, of ZeRO stages 1 to 3, and universal ones
dcp          torch.distributed.checkpoint's, of FSDP2, torchtitan and Accelerate
plain        Trainer's and Accelerate's of torch's own optimizer
archives     files of torch.save, read by torch.load without code, mapped, and only such as lie in the folder
restricted   pickles without an archive; what stands in for their classes, and for those that torch.load refuses
"""
