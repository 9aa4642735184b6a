import torch
from torch import nn


class IntOps(nn.Module):
    def forward(self, a, b):
        return (
            a % 32,
            torch.remainder(a, b),
            torch.fmod(a, b),
            a // b,
            torch.div(a, b, rounding_mode="trunc"),
            a >> 3,
            a << 2,
            a & 255,
            a ^ b,
            a / b,
            torch.remainder(a.float(), 2.5),
        )


def make():
    big = [18542495, 2147483647, 1800000000, -2147483647]
    ins = []
    for dt, extra in ((torch.int32, []), (torch.int64, [2**40 + 7, -(2**40) - 7])):
        a = torch.tensor([7, -7, 7, -7, 0, -1, -9, 1] + big + extra, dtype=dt)
        b = torch.tensor([3, 3, -3, -3, 5, 8, 3, -4, 32, 32, -7, 10] + [9, 9][: len(extra)], dtype=dt)
        ins.append((a, b))

    def check(model, inputs, outputs):
        for (a, b), o in zip(inputs, outputs):
            A, B = a.tolist(), b.tolist()
            bits = 32 if a.dtype == torch.int32 else 64
            wrap = lambda n: (n + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
            tr = lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            want = [
                [x % 32 for x in A],
                [x % y for x, y in zip(A, B)],
                [x - y * tr(x, y) for x, y in zip(A, B)],
                [x // y for x, y in zip(A, B)],
                [tr(x, y) for x, y in zip(A, B)],
                [x >> 3 for x in A],
                [wrap(x << 2) for x in A],
                [x & 255 for x in A],
                [x ^ y for x, y in zip(A, B)],
            ]
            names = "mod32 remainder fmod floordiv truncdiv shr shl and xor".split()
            for n, w, g in zip(names, want, o):
                assert g.dtype == a.dtype, f"{n}: dtype {g.dtype}"
                assert g.tolist() == w, f"{n} ({a.dtype}): got {g.tolist()}, want {w}"
            assert o[9].dtype == torch.float32, "int / int is a float in torch"
            f = torch.tensor([x / y for x, y in zip(A, B)])
            assert torch.allclose(o[9], f, rtol=1e-5), f"true division gives {o[9].tolist()}"
            r = torch.tensor([float(x) % 2.5 for x in a.float().tolist()])
            assert torch.allclose(o[10], r, atol=1e-4), f"float remainder gives {o[10].tolist()}"

    # one signature per dtype: the two inputs are two different recorded signatures
    return (
        IntOps().eval(),
        ins,
        dict(
            kind="integer division, remainder and shifts of negative and large values",
            rtol=1e-4,
            atol=1e-4,
            check=check,
            source_thread="NVIDIA/TensorRT#4702, pytorch/pytorch#191014, pytorch/TensorRT#1957, microsoft/onnxscript#2589",
            expected="floor semantics for // and %, truncation for fmod, arithmetic shift; integers compared exactly",
        ),
    )
