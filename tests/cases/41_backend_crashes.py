import os

import torch
from torch import nn


def crashing_backend(gm, example_inputs):
    """Stands for a native compiler that segfaults while building."""
    os.abort()


def make():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    return (
        m,
        [(torch.randn(2, 8),)],
        dict(
            kind="backend kills the process while compiling",
            custom_backend=crashing_backend,
            source_thread="NVIDIA/TensorRT-LLM#2089, debpalash/VoiceStudio#2149, pytorch/TensorRT#480",
            expected="build runs in a child; parent (kernel) survives; row says 'crashed: SIGABRT'; next backend is tried; crash remembered",
        ),
    )
