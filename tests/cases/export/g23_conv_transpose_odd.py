import torch
import torch.nn.functional as F
from torch import nn

CFG = [
    dict(k=3, s=2, p=1, op=1, d=1, g=1),
    dict(k=3, s=(2, 3), p=(0, 1), op=(1, 2), d=1, g=2),
    dict(k=2, s=3, p=0, op=2, d=2, g=1),
]


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(4, 4, c["k"], c["s"], c["p"], c["op"], c["g"], dilation=c["d"]) for c in CFG
        )
        self.stem = nn.Conv2d(4, 4, 7, stride=4, padding=2)  # stride does not divide the input
        self.s2d = nn.PixelUnshuffle(2)

    def forward(self, x):
        h, w = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
        return tuple(u(x) for u in self.ups), self.stem(x), self.s2d(x[:, :, :h, :w])


def by_hand(x, u, c):
    """Insert zeros, pad, and run an ordinary convolution with the flipped kernel (in double)."""
    two = lambda v: (v, v) if isinstance(v, int) else v
    s, p, op, k = two(c["s"]), two(c["p"]), two(c["op"]), c["k"]
    b, ch, h, w = x.shape
    z = torch.zeros(b, ch, (h - 1) * s[0] + 1, (w - 1) * s[1] + 1, dtype=torch.float64)
    z[:, :, :: s[0], :: s[1]] = x.double()
    e = c["d"] * (k - 1)
    z = F.pad(z, (e - p[1], e - p[1] + op[1], e - p[0], e - p[0] + op[0]))
    n = ch // c["g"]
    wt = torch.cat([blk.transpose(0, 1) for blk in u.weight.detach().double().split(n)]).flip(2, 3)
    return F.conv2d(z, wt, u.bias.detach().double(), dilation=c["d"], groups=c["g"])


def make():
    torch.manual_seed(0)
    m = Up().eval()
    ins = [(torch.randn(b, 4, h, w),) for b, h, w in ((1, 7, 11), (2, 8, 5))]

    def check(model, inputs, outputs):
        ref = make()[0]
        for (x,), (ups, stem, s2d) in zip(inputs, outputs):
            for c, u, g in zip(CFG, ref.ups, ups):
                want = by_hand(x, u, c)
                assert g.shape == want.shape, f"{c}: {tuple(g.shape)} instead of {tuple(want.shape)}"
                assert (g.double() - want).abs().max() < 1e-4, f"{c}: values moved (which side got the extra row?)"
            pick = F.unfold(x.double(), 7, padding=2, stride=4)
            want = (
                ref.stem.weight.detach().double().flatten(1) @ pick + ref.stem.bias.detach().double()[:, None]
            ).view(x.shape[0], 4, *stem.shape[2:])
            assert (stem.double() - want).abs().max() < 1e-4, "stride-4 stem on an odd picture"
            for q in range(4):
                hh, ww = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
                assert torch.equal(s2d[:, q::4], x[:, :, q // 2 : hh : 2, q % 2 : ww : 2]), (
                    "space-to-depth channel order"
                )

    return (
        m,
        ins,
        dict(
            kind="ConvTranspose with output_padding/groups/dilation on dynamic odd sizes",
            rtol=1e-3,
            atol=1e-4,
            check=check,
            source_thread="NVIDIA-AI-IOT/torch2trt#734, pytorch/TensorRT#623",
            expected="output size AND position of the extra row/column match; two sizes so that a frozen output size shows",
        ),
    )
