import torch
from torch import nn


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(1, 4),) for _ in range(4)]
    return (
        nn.Linear(4, 4).eval(),
        ins,
        dict(
            kind="4x4 Linear: a few microseconds per call",
            perf="wrapper_overhead",
            source_thread="ScalingIntelligence/KernelBench#68, pytorch/pytorch#119611",
            expected="wrapper adds < ~10 us; gain below noise is not a win; timer resolution handled (inner loops)",
            rtol=1e-4,
            atol=1e-5,
        ),
    )
