import time

import torch
from torch import nn


def hanging_backend(gm, example_inputs):
    """Stands for a compiler that never returns."""
    while True:
        time.sleep(1)


def make():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    return (
        m,
        [(torch.randn(2, 8),)],
        dict(
            kind="backend never returns from compile",
            custom_backend=hanging_backend,
            source_thread="pytorch/pytorch#162199, pytorch/pytorch#181293, pytorch/pytorch#115366",
            expected="per-backend time limit kills the whole child process group; UI stays alive and Stop works; row says 'timed out after N s'",
        ),
    )
