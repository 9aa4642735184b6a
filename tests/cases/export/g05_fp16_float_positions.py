import torch
from torch import nn


class Positions(nn.Module):
    """Positions travel as floats: rotary angles and a table lookup through .long()."""

    def __init__(self, n=8192, d=8):
        super().__init__()
        self.register_buffer("inv", 1.0 / (100.0 ** (torch.arange(0, d, 2).float() / d)))
        self.register_buffer("table", torch.arange(n, dtype=torch.float32)[:, None] % torch.tensor([7.0, 64.0, 1000.0]))

    def forward(self, pos):
        ang = pos[..., None] * self.inv
        return ang.sin(), ang.cos(), self.table[pos.long()], torch.cumsum(torch.ones_like(pos), -1)


def make():
    ins = [
        (torch.arange(s, s + n, dtype=torch.float32)[None],) for s, n in ((0, 16), (2040, 24), (8100, 50), (0, 4100))
    ]

    def check(model, inputs, outputs):
        m = torch.tensor([7.0, 64.0, 1000.0])
        for (pos,), (s, c, row, count) in zip(inputs, outputs):
            ids = pos[0].long()
            assert torch.equal(row[0].float(), (ids[:, None] % m.long()).float()), (
                "wrong table row: odd positions past 2048 were rounded"
            )
            assert count[0, -1] == len(ids) and (count[0, 1:] > count[0, :-1]).all(), "running count got stuck"
            inv = 1.0 / (100.0 ** (torch.arange(0, 8, 2).double() / 8))
            ang = pos[0].double()[:, None] * inv
            assert (s[0].double() - ang.sin()).abs().max() < 5e-3 and (c[0].double() - ang.cos()).abs().max() < 5e-3, (
                "rotary angle lost bits"
            )

    return (
        Positions().eval(),
        ins,
        dict(
            kind="fp16: integers above 2048 held in a float tensor",
            dtype="float16",
            rtol=5e-3,
            atol=5e-3,
            check=check,
            source_thread="NVIDIA/Megatron-LM#535, openvinotoolkit/openvino#33214",
            expected="index- and position-carrying floats stay fp32; checking only short sequences passes and is not enough",
        ),
    )
