import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        logits = self.head(h)
        return {
            "zeta": logits,
            "alpha": {"pooled": h.mean(-1), "norm": h.norm(dim=-1, keepdim=True)},
            "count": (logits > 0).sum(-1),
        }


def make():
    torch.manual_seed(0)
    m = Net().eval()
    ins = [(torch.randn(b, 16),) for b in (2, 3)]

    def check(model, inputs, outputs):
        for o in outputs:
            assert type(o) is dict and list(o) == ["zeta", "alpha", "count"], f"keys/order lost: {type(o)}"
            assert o["count"].dtype == torch.int64, "int64 output narrowed"

    return (
        m,
        ins,
        dict(
            kind="dict output (nested, unsorted keys, int64 leaf)",
            source_thread="pytorch/TensorRT#3133",
            expected="same nested dict, same key order, int64 leaf stays int64",
            check=check,
        ),
    )
