import torch
from torch import nn


class Heads(nn.Module):
    """Last hidden state is returned three times, one input is never read, one is read only for its shape."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, unused_mask, like):
        h0 = self.a(x)
        h1 = self.b(h0.tanh())
        return h1, (h0, h1, h1), x.transpose(0, 1), h1.new_zeros(like.shape), unused_mask


def make():
    torch.manual_seed(0)
    m = Heads().eval()
    ins = [(torch.randn(b, 6), torch.rand(b, 3) > 0.5, torch.randn(c, 2)) for b, c in ((2, 5), (4, 3))]

    def check(model, inputs, outputs):
        ref = make()[0]
        for (x, u, like), o in zip(inputs, outputs):
            assert len(o) == 5 and len(o[1]) == 3, "duplicated outputs were merged"
            with torch.no_grad():
                h0 = x @ ref.a.weight.T + ref.a.bias
                h1 = h0.tanh() @ ref.b.weight.T + ref.b.bias
            for g, w in ((o[0], h1), (o[1][0], h0), (o[1][1], h1), (o[1][2], h1)):
                assert torch.allclose(g, w, rtol=1e-4, atol=1e-5), "an output landed in the wrong slot"
            assert torch.equal(o[2], x.T), "transposed input"
            assert o[3].shape == like.shape and not o[3].any(), "shape of a shape-only input was baked in"
            assert o[4].dtype == torch.bool and torch.equal(o[4], u), "bool pass-through"

    return (
        m,
        ins,
        dict(
            kind="same tensor returned three times, unused and shape-only inputs, bool pass-through",
            check=check,
            rtol=1e-4,
            atol=1e-5,
            source_thread="pytorch/TensorRT#728, microsoft/onnxruntime#3141, NVIDIA-AI-IOT/torch2trt#355",
            expected="bind inputs and outputs by position, survive pruned inputs, restore duplicates; no crash at run time",
        ),
    )
