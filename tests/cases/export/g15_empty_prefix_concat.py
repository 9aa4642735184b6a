import torch
from torch import nn


class Prefixed(nn.Module):
    """First call has an empty past; later calls do not. Some reductions run over zero elements."""

    def __init__(self, d=8):
        super().__init__()
        self.k = nn.Linear(d, d)

    def forward(self, x, past):
        full = torch.cat([past, self.k(x)], 1)
        w = (x @ full.transpose(1, 2)).softmax(-1)
        return w @ full, full, past.sum(1), past.prod(1), x[:, :0], (past > 0).all(1), past.flatten(1)


def make():
    torch.manual_seed(0)
    ins = [(torch.randn(2, n, 8), torch.randn(2, p, 8)) for n, p in ((3, 4), (3, 0), (1, 0), (2, 7))]

    def check(model, inputs, outputs):
        k = make()[0].k
        for (x, past), o in zip(inputs, outputs):
            n, p = x.shape[1], past.shape[1]
            assert o[0].shape == (2, n, 8) and o[1].shape == (2, n + p, 8) and torch.isfinite(o[0]).all(), (
                "attention over an empty past"
            )
            assert torch.equal(o[1][:, :p], past), "the past must come first, untouched"
            new = x @ k.weight.detach().T + k.bias.detach()
            assert (o[1][:, p:] - new).abs().max() < 1e-4, "new keys"
            both = torch.cat([past, new], 1)
            assert (o[0] - (x @ both.transpose(1, 2)).softmax(-1) @ both).abs().max() < 1e-3, (
                "attention over past and new"
            )
            if p == 0:
                assert not o[2].any() and (o[3] == 1).all() and o[5].all(), "empty sum/product/all are 0, 1, True"
            else:
                assert torch.allclose(o[2], past.double().sum(1).float(), atol=1e-4), "sum over the past"
                assert torch.allclose(
                    o[3].double().log().nan_to_num(0.0), past.double().prod(1).log().nan_to_num(0.0), atol=1e-3
                ) and torch.equal(o[3] > 0, past.double().prod(1) > 0), "product over the past"
                assert torch.equal(o[5], past.min(1).values > 0) and o[6].tolist() == [
                    [v for r in b for v in r] for b in past.tolist()
                ]
            assert o[4].shape == (2, 0, 8) and o[6].shape == (2, 8 * p) and o[4].dtype == x.dtype, (
                "zero-width output lost its shape"
            )

    return (
        Prefixed().eval(),
        ins,
        dict(
            kind="an input that is empty on some calls; empty reductions",
            check=check,
            rtol=1e-4,
            atol=1e-5,
            source_thread="NVIDIA/TensorRT#337, pytorch/TensorRT#3891",
            expected="profiles/guards admit length 0 (or that call goes to eager); no stale memory in empty reductions",
        ),
    )
