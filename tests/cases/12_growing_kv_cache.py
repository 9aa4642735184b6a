import torch
from torch import nn


class Cache:
    def __init__(self):
        self.k, self.v = [], []

    def update(self, i, k, v):
        if i == len(self.k):
            self.k.append(k)
            self.v.append(v)
        else:
            self.k[i] = torch.cat([self.k[i], k], 1)
            self.v[i] = torch.cat([self.v[i], v], 1)
        return self.k[i], self.v[i]

    def length(self):
        return self.k[0].shape[1] if self.k else 0


class Dec(nn.Module):
    def __init__(self, d=16, n=2):
        super().__init__()
        self.emb = nn.Embedding(40, d)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(n))
        self.head = nn.Linear(d, 40)

    def forward(self, ids, cache=None, use_cache=True):
        h = self.emb(ids)
        past = cache.length() if cache is not None else 0
        for i, l in enumerate(self.qkv):
            q, k, v = l(h).chunk(3, -1)
            if cache is not None:
                k, v = cache.update(i, k, v)
            a = q @ k.transpose(1, 2) / 4.0
            t = torch.arange(k.shape[1])[None, :] > (torch.arange(q.shape[1]) + past)[:, None]
            h = h + a.masked_fill(t, float("-inf")).softmax(-1) @ v
        return self.head(h), (cache if use_cache else None)


def make():
    torch.manual_seed(0)
    c = Cache()
    ins = [((torch.randint(0, 40, (2, 6)),), dict(cache=c))] + [
        ((torch.randint(0, 40, (2, 1)),), dict(cache=c)) for _ in range(4)
    ]

    def check(model, inputs, outputs):
        assert c.length() == 10, f"cache length {c.length()} != 10"
        assert outputs[-1][1] is c, "returned cache is not the caller's object"

    return (
        Dec().eval(),
        ins,
        dict(
            kind="custom KV-cache object, mutated and growing",
            check=check,
            rtol=1e-4,
            atol=1e-4,
            source_thread="huggingface/transformers#37908, pytorch/pytorch#136582",
            expected="cache identity and growth kept; samples snapshot the cache; prefill/decode profiled apart",
        ),
    )
