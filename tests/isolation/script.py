"""What a user's script looks like: classes of its own, no `if __name__ == "__main__"`. Driven by test_lifetime.py.

It says on stdout what happens, builds something that works, then twice something that hangs. The first time it bears
an interrupt, the second time it is killed.
"""

import collections
import dataclasses
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from faults import FaultyBackend, faulty, job_for

from aitune_lab.backends import registry
from aitune_lab.isolation import Children

assert __name__ == "__main__"
folder = Path(sys.argv[1])
scale = 2.0


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.act = lambda x: scale * x

    def forward(self, pair):
        return Pair(self.act(self.linear(pair.left)), pair.right)


class OwnBackend(FaultyBackend):
    name = "own"

    def build(self, job):
        counts = collections.Counter(type(leaf).__name__ for leaf in job.samples[0].leaves)
        made = super().build(job)
        made.notes = (f"saw {counts['Tensor']} tensors",)
        return made


def say(*words):
    print(*words, flush=True)


def progress(phase, done):
    if phase == "compiling" and pids.exists():
        hanging = pids.read_text().split()
        pids.unlink()  # before it is said, as the interrupt comes right after
        say("hanging", *hanging, children._helper.process.pid)


registry.register(FaultyBackend)
registry.register(OwnBackend)
children = Children(folder / "children")
pids = folder / "pids"
net = Net().eval()
given = Pair(torch.ones(2, 4), torch.zeros(2))
artifact = folder / "artifact"
artifact.mkdir()
made = children.build(job_for(net, artifact, OwnBackend().candidate(), (given,)))
with torch.no_grad():
    same = torch.equal(made.executable.call(given).left, net(given).left)
say("built", made.isolated, same, *made.executable.notes)
try:
    children.build(job_for(net, artifact, faulty("hang", pids), (given,), progress=progress))
except KeyboardInterrupt:
    say("interrupted", children._helper, len(list(artifact.iterdir())))
children.build(job_for(net, artifact, faulty("hang", pids), (given,), progress=progress))
