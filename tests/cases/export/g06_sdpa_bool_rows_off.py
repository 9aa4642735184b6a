import torch
import torch.nn.functional as F
from torch import nn


class Sdpa(nn.Module):
    def __init__(self, d=16, h=2):
        super().__init__()
        self.qkv, self.o, self.h = nn.Linear(d, 3 * d), nn.Linear(d, d), h

    def forward(self, x, allow):
        b, s, d = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allow)
        return self.o(y.transpose(1, 2).reshape(b, s, d)), y


def make():
    torch.manual_seed(0)
    m = Sdpa().eval()
    ins = []
    for b, s in ((2, 5), (3, 7)):
        allow = torch.ones(s, s).tril().bool().expand(b, 1, s, s).clone()
        allow[0, :, 2] = False  # one query may look at nothing
        allow[-1, :, :, 0] = False  # padding at the front: query 0 may look at nothing
        ins.append((torch.randn(b, s, 16), allow))

    def check(model, inputs, outputs):
        ref = make()[0]
        for (x, allow), (o, y) in zip(inputs, outputs):
            dead = ~allow.any(-1)  # (b, 1, s)
            assert dead.any()
            assert torch.isfinite(y).all(), "rows with nothing to attend to became NaN (eager gives zeros)"
            assert y.transpose(1, 2)[dead[:, 0]].abs().max() < 1e-6, "rows with nothing to attend to must be zero"
            q, k, v = (
                w.detach()
                for w in (x @ ref.qkv.weight.T + ref.qkv.bias).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
            )
            p = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~allow, float("-inf")).softmax(-1).nan_to_num(0.0)
            assert (y - p @ v).abs().max() < 1e-4, "live rows"
            want = (p @ v).transpose(1, 2).flatten(2) @ ref.o.weight.detach().T + ref.o.bias.detach()
            assert (o - want).abs().max() < 1e-4, "projection"
            bias = o[dead[:, 0]]
            assert (bias - bias[0]).abs().max() < 1e-5, "after the projection such rows equal its bias"

    return (
        m,
        ins,
        dict(
            kind="SDPA with a boolean mask that switches whole rows off",
            rtol=1e-3,
            atol=1e-4,
            check=check,
            source_thread="microsoft/onnxscript#2479, pytorch/pytorch#103963",
            expected="zeros, not NaN and not a uniform average over masked keys; test with masks that have dead rows",
        ),
    )
