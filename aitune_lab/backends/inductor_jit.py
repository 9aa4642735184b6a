"""Torch Inductor through `torch.compile`, made fit for other people's calls.

What differs from calling `torch.compile(module)`:

- every candidate has code objects of its own, so that it never meets graphs compiled by another candidate or by the user;
- everything is compiled when the candidate is built, at every point; a user's call never compiles: one that would have
  to runs the original and is counted;
- one graph serves all threads, `no_grad` and `inference_mode`, ordinary and inference tensors alike.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..capture.probe import autocast_of
from ..capture.recorder import Sample, as_tensor, clone_leaf
from ..capture.signature import resized
from ..capture.structure import unflatten_call
from ..errors import Refused
from ..schema import Candidate, Point, Signature, TensorLeaf, dim_symbol, evaluate_dim
from .base import Availability, Backend, BackendConfig, BuildJob, Executable
from .export import quiet, untouched
from .indices import checking, index_ranges_of_torch

if TYPE_CHECKING:
    from torch import nn

_WRAPPER = """
def make(original, is_dynamo_compiling, missed):
    def compiled_call_{number}(*args, **kwargs):
        if not is_dynamo_compiling():
            return missed
        return original(*args, **kwargs)
    return compiled_call_{number}
"""
"""Under Dynamo the condition is the constant False: only a call that no compiled graph covers gives `missed`.

The module is reached through a closure: Dynamo takes numbers that it reaches through globals for constants.
"""

_MISSED = object()

_numbers = itertools.count()
"""Dynamo remembers by function name which sizes varied, so the code of each candidate has a name of its own."""

_SETTLING_CALLS = 6
"""Calls of one sample until its graph stays: counters in attributes need one each for 0, 1 and "any number"."""


@dataclass(frozen=True)
class TorchInductorJitConfig(BackendConfig):
    """Options of Inductor.

    Attributes:
        freezing: bake the weights in and fold and pack them: the option that matters on the CPU.
        mode: a mode of `torch.compile`, without CUDA graphs: None, `"max-autotune-no-cudagraphs"`.
        fullgraph: refuse a module that needs more than one graph.
        dynamic: let varying dimensions be symbols; otherwise every point gets a static graph.
    """

    freezing: bool = False
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool = True


class TorchInductorJitBackend(Backend):
    """Compiles the module in this process; `.ait` keeps the configuration and compiles again at load."""

    name = "inductor"
    config_type = TorchInductorJitConfig
    isolation = "process"
    imports = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp")
    capturable = True
    further = "fallbacks"
    complexity = 1
    config: TorchInductorJitConfig

    @classmethod
    def available(cls) -> Availability:
        versions = {"torch": torch.__version__}
        if not _compiler():
            return Availability(
                False, "no C++ compiler found", "Install one: apt-get install g++ (or set CXX)", versions
            )
        return Availability(True, versions=versions)

    def candidates(self, signature: Signature, module: nn.Module) -> list[Candidate]:
        devices = {leaf.device.partition(":")[0] for leaf in signature.tensor_leaves}
        plain = TorchInductorJitBackend().candidate()
        if "cuda" in devices:
            further = {"freezing": True}, {"mode": "max-autotune-no-cudagraphs"}
            proposed = [plain, *(TorchInductorJitBackend(**options).candidate() for options in further)]
            return proposed if importlib.util.find_spec("triton") else []
        return [TorchInductorJitBackend(freezing=True).candidate(), plain]

    def weight_copies(self) -> int:
        return 1 if self.config.freezing else 0

    def build(self, job: BuildJob) -> Executable:
        config = self.config
        compiled = _Compiled(job, config)
        try:
            with (
                _settings(job, config),
                untouched(job.module, job.signature),
                _counted_breaks() as breaks,
                compiled.entered(),
            ):
                samples = _warm_up_samples(job)
                settled = False
                for number, sample in enumerate(samples):
                    job.progress(f"compiling for {sample.point.label}", number / len(samples))
                    settled |= compiled.settle(sample, config.dynamic)
            if not compiled.graphs:
                raise Refused("nothing in it can be compiled")
            if not settled:
                raise Refused("every call would have to be compiled again")
            covered = compiled.check_covered(job.samples)
        except BaseException:
            compiled.close()
            raise
        notes = [f"{compiled.graphs} graph{'s' if compiled.graphs != 1 else ''} compiled", *_break_notes(breaks)]
        if covered < len(job.samples):
            notes.append(
                f"{len(job.samples) - covered} of {len(job.samples)} recorded calls would recompile and run the original"
            )
        return Executable(
            compiled.call,
            flat=False,
            live_weights=not config.freezing,
            recompiles=True,
            close=compiled.close,
            notes=tuple(notes),
            uncovered=compiled.uncovered,
        )


def _compiler() -> str | None:
    """The C++ compiler that Inductor would use, or None."""
    from torch._inductor import config

    names = config.cpp.cxx if isinstance(config.cpp.cxx, (list, tuple)) else (config.cpp.cxx,)
    return next((found for name in (*names, "g++", "clang++", "cl") if name and (found := shutil.which(name))), None)


@contextmanager
def _settings(job: BuildJob, config: TorchInductorJitConfig) -> Iterator[None]:
    """The settings under which everything is compiled, put back afterwards."""
    import torch._dynamo.config
    import torch._inductor.config

    dynamo = {
        "allow_unspec_int_on_nn_module": True,  # a counter in an attribute is a number, not a constant
        "recompile_limit": 64,
        "accumulated_recompile_limit": 256,
        "suppress_errors": False,
    }
    # Dynamo itself asks the global setting whether weights are frozen, so this is no option of the compile.
    inductor = {"freezing": config.freezing, "fallback_random": job.signature.facts.random, "size_asserts": True}
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(dynamo))
        stack.enter_context(torch._inductor.config.patch(inductor))
        stack.enter_context(_cache(job.shared))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(quiet("torch._dynamo"))
        yield


@contextmanager
def _cache(shared: Path | None) -> Iterator[None]:
    """Inductor finds what it compiled before, in this process or another, in the job's shared folder, if it has one.

    Torch reads the place from the environment at each compilation, and knows no other way to name it.
    """
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if shared is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(shared / "inductor")
    try:
        yield
    finally:
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
        elif shared is not None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


@contextmanager
def _counted_breaks() -> Iterator[dict[str, int]]:
    """Reasons of the graph breaks met inside, with their counts."""
    from torch._dynamo.utils import counters

    before = dict(counters["graph_break"])
    found: dict[str, int] = {}
    yield found
    for reason, count in counters["graph_break"].items():
        if count > before.get(reason, 0):
            found[reason] = count - before.get(reason, 0)


def _break_notes(breaks: dict[str, int]) -> list[str]:
    if not breaks:
        return []
    reasons = list(dict.fromkeys(reason.strip().splitlines()[0][:120] for reason in breaks))
    return [f"graph breaks: {'; '.join(reasons[:3])}" + ("; …" if len(reasons) > 3 else "")]


class _GraphCompiler:
    """Compiles Dynamo's graphs and counts them. Torch keeps each backend for good, so this holds no module."""

    def __init__(self, mode: str | None) -> None:
        self.patches = _mode_options(mode)
        self.graphs = 0

    def compile(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        ranges = index_ranges_of_torch(graph.graph)
        compiled = compile_fx(graph, inputs, config_patches=self.patches)
        return checking(compiled, ranges) if ranges else compiled


class _Compiled:
    """One candidate's own code objects, what is compiled for them, and the calls that nothing covered."""

    def __init__(self, job: BuildJob, config: TorchInductorJitConfig) -> None:
        self.job = job
        self.missed = itertools.count()
        self.missed_reads = 0
        self.original: Callable[..., Any] = job.original
        self.own = _own_code(job.original)
        namespace: dict[str, Any] = {}
        # With the name of a real file: some versions of torch compile a frame of their own around what has no source.
        exec(compile(_WRAPPER.format(number=next(_numbers)), __file__, "exec"), namespace)
        self.wrapper = namespace["make"](self.own, torch.compiler.is_dynamo_compiling, _MISSED)
        self.compiler = _GraphCompiler(config.mode)
        fullgraph = config.fullgraph or config.freezing
        self.compiling = torch.compile(self.wrapper, backend=self.compiler.compile, fullgraph=fullgraph)
        self.include, self.exclude = _dispatch_keys(job.signature)
        self.call = self._caller()

    @property
    def graphs(self) -> int:
        return self.compiler.graphs

    def _caller(self) -> Callable[..., Any]:
        """Runs what is compiled and compiles nothing (Dynamo's run-only mode).

        A graph is guarded by the dispatch keys of its inputs, which differ between `no_grad` and `inference_mode`, and
        between ordinary and inference tensors. With the autograd keys left out, as they are without gradients anyhow,
        all four look alike; whether new tensors are inference tensors stays the caller's mode.
        """
        from torch._C import _ForceDispatchKeyGuard
        from torch._C._dynamo.eval_frame import set_eval_frame

        wrapper, include, exclude = self.wrapper, self.include, self.exclude
        original, form, missed, nothing = self.original, self.job.form, self.missed, _MISSED

        def call(*args: Any, **kwargs: Any) -> Any:
            prior = set_eval_frame(False)
            try:
                with _ForceDispatchKeyGuard(include, exclude):
                    result = wrapper(*args, **kwargs)
            finally:
                set_eval_frame(prior)
            return result if result is not nothing else recover(args, kwargs)

        def recover(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Graphs are compiled for one way to pass the arguments: positional or by keyword, defaults left out.
            usual_args, usual_kwargs = form.arguments(form.normalize(args, kwargs))
            if len(usual_args) != len(args) or list(usual_kwargs) != list(kwargs):
                return call(*usual_args, **usual_kwargs)
            next(missed)
            return original(*args, **kwargs)

        return call

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The context of every compiling call: no gradients, the signature's autocast, the keys of `_caller`."""
        with torch.no_grad(), autocast_of(self.job.signature.autocast):
            with torch._C._ForceDispatchKeyGuard(self.include, self.exclude):
                yield

    def settle(self, sample: Sample, dynamic: bool) -> bool:
        """Compile at a sample until a call runs compiled code; False if none ever does."""
        for _ in range(_SETTLING_CALLS):
            args, kwargs = self._arguments(sample, dynamic)
            self.compiling(*args, **kwargs)  # type: ignore[no-untyped-call]
            args, kwargs = self._arguments(sample, dynamic=False)
            before = self.uncovered()
            self.call(*args, **kwargs)
            if self.uncovered() == before:
                return True
        return False

    def check_covered(self, samples: Any) -> int:
        """How many samples run compiled code, as the user's calls will."""
        before = self.uncovered()
        with untouched(self.job.module, self.job.signature), torch.no_grad(), autocast_of(self.job.signature.autocast):
            for sample in samples:
                args, kwargs = self._arguments(sample, dynamic=False)
                self.call(*args, **kwargs)
        missed = self.uncovered() - before
        self.missed_reads += missed + before  # what follows are the user's calls
        return len(samples) - missed

    def _arguments(self, sample: Sample, dynamic: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [clone_leaf(x) for x in sample.leaves]
        if dynamic:
            _mark(leaves, self.job.signature, sample.point)
        return self.job.form.arguments(unflatten_call(sample.node, leaves))

    def uncovered(self) -> int:
        """Calls so far that ran the original."""
        count = next(self.missed) - self.missed_reads
        self.missed_reads += 1
        return count

    def close(self) -> None:
        """Drop the compiled code; calls from now on run the original."""
        from torch._C._dynamo.eval_frame import reset_code

        reset_code(self.wrapper.__code__)
        if self.own is not self.original:
            reset_code(self.own.__func__.__code__)  # type: ignore[attr-defined]


def _own_code(method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain Python method with a code object of its own, so that what is compiled for it stays with this candidate."""
    function = getattr(method, "__func__", None)
    if type(function) is not types.FunctionType or type(method) is not types.MethodType:
        return method
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return types.MethodType(copy, method.__self__)


def _dispatch_keys(signature: Signature) -> tuple[Any, Any]:
    """Included and excluded dispatch keys at compiled calls: those of a plain call, less the autograd keys."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        autocast_of(signature.autocast),
        torch._C._AutoDispatchBelowAutograd(),
    ):
        return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return {k: v for k, v in list_mode_options(mode).items() if k != "triton.cudagraphs"}


def _warm_up_samples(job: BuildJob) -> list[Sample]:
    """The recorded samples, and synthetic ones where a symbol's range holds 1, or more than 1, that nobody called.

    Those with distinct sizes of at least 2 come first: from them the graph for all sizes is made.
    """
    samples = list(job.samples)
    if not samples:
        raise Refused("no call was recorded with which the module could be compiled")
    symbols = job.signature.symbols
    options = [sorted({1 if s.min <= 1 <= s.max else s.max, max(s.opt, min(2, s.max))}) for s in symbols[:3]]
    seen = {tuple(_kind(s.point.as_dict()[symbol.name]) for symbol in symbols) for s in samples}
    for sizes in itertools.product(*options) if symbols else ():
        point = dict(zip((s.name for s in symbols), (*sizes, *(s.opt for s in symbols[3:])), strict=True))
        kinds = tuple(map(_kind, point.values()))
        if kinds not in seen:
            seen.add(kinds)
            samples.append(resized(samples[0], job.signature, Point(tuple(point.items()))))
    return sorted(samples, key=_specific)


def _kind(size: int) -> int:
    """Sizes 0 and 1 are fixed by Dynamo; all others are one."""
    return min(size, 2)


def _specific(sample: Sample) -> tuple[int, int]:
    sizes = list(sample.point.as_dict().values())
    return sum(size < 2 for size in sizes), -len(set(sizes))


def _mark(leaves: list[Any], signature: Signature, point: Point) -> None:
    """Tell Dynamo which axes vary. Sizes 0 and 1 get graphs of their own whatever one says."""
    ranges = {s.name: s.min < s.max for s in signature.symbols}
    for leaf, value in zip(signature.leaves, leaves, strict=True):
        if not isinstance(leaf, TensorLeaf):
            continue
        for axis, dim in enumerate(leaf.dims):
            name = dim_symbol(dim)
            if name is not None and ranges[name] and evaluate_dim(dim, point.as_dict()) >= 2:
                torch._dynamo.maybe_mark_dynamic(as_tensor(value), axis)
