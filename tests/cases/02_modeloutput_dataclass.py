from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Optional

import torch
from torch import nn


class Record(OrderedDict):
    """Dict, attribute and tuple access; None fields are left out (the common hub output style)."""

    def __post_init__(self):
        for f in fields(self):
            v = getattr(self, f.name)
            if v is not None:
                OrderedDict.__setitem__(self, f.name, v)

    def __getitem__(self, k):
        return OrderedDict.__getitem__(self, k) if isinstance(k, str) else tuple(self.values())[k]


@dataclass
class EncoderRecord(Record):
    last: Optional[torch.Tensor] = None
    pooled: Optional[torch.Tensor] = None
    hidden: Optional[tuple] = None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, output_hidden=False):
        hs = ()
        for l in self.layers:
            x = torch.relu(l(x))
            hs = hs + (x,)
        return EncoderRecord(last=x, hidden=hs if output_hidden else None)


def make():
    torch.manual_seed(0)
    m = Encoder().eval()
    ins = [((torch.randn(2, 4, 8),), {}), ((torch.randn(2, 4, 8),), {"output_hidden": True})]

    def check(model, inputs, outputs):
        for o in outputs:
            assert type(o).__name__ == "EncoderRecord", f"output type became {type(o).__name__}"
            assert o.pooled is None and "pooled" not in o, "None field changed"
            assert torch.equal(o[0], o.last) and torch.equal(o["last"], o.last), "access styles disagree"
        assert outputs[0].hidden is None and len(outputs[1].hidden) == 3

    return (
        m,
        ins,
        dict(
            kind="dataclass/OrderedDict ModelOutput with None fields, optional tuple field",
            source_thread="pytorch/pytorch#96386",
            check=check,
            expected="wrapper returns the very same class; None fields stay None; flag switches field on",
        ),
    )
