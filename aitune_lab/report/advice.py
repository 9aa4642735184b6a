"""Findings about a target or a tuning: what may go wrong or is left on the table, by which evidence, and what to do.

All functions are pure: they take facts that inspecting and tuning have gathered and give findings; `machine_facts()`
alone asks the process. A finding says no more than its evidence carries: "worth trying" is not "faster".
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..runtime.dispatch import GRADIENTS, TRAINING
from ..schema import Signature, TensorLeaf

if TYPE_CHECKING:
    from ..capture.inspector import Inspection, ModuleRow
    from ..runtime.installed import Stats
    from ..tuning.result import TuneResult

PYTHON_BOUND_SHARE = 0.3
"""A module that spends at least this share of the end-to-end time in itself, over tiny tensors, is bound by Python."""
TINY_ELEMENTS = 4096
"""Tensors of fewer elements than this are computed faster than Python dispatches the operator."""
OUTLIER_RATIO = 20.0
"""An input channel whose largest weight is so many times the median channel's is an outlier (LLM.int8() sees 20 and up)."""
SMALL_BATCH_GAIN = 1.5
"""Throughput at a larger batch size must be at least so many times that of the smallest one to be worth a finding."""
_ORDER = ("high", "medium", "low")


@dataclass(frozen=True)
class Finding:
    """One thing to know.

    Attributes:
        hazard: what may go wrong or is left on the table, in a few words.
        evidence: what was seen, with figures.
        mitigation: what to do.
        path: the module it is about; empty for the target or the machine.
        kind: a stable name, for filters and tests.
        severity: `"high"` (figures may not be what they seem), `"medium"`, `"low"` (worth trying).
    """

    hazard: str
    evidence: str
    mitigation: str
    path: str = ""
    kind: str = ""
    severity: str = "medium"


@dataclass(frozen=True)
class MachineFacts:
    """What of the process and the machine findings rest on.

    Attributes:
        threads: torch's intra-op threads.
        cores: CPUs that this process may use.
        omp_threads: what `OMP_NUM_THREADS` says, None if it isn't set.
        cuda: whether the target runs on CUDA.
        matmul_precision: `torch.get_float32_matmul_precision()`.
        tensor_cores: the GPU computes TF32 on tensor cores (compute capability 8.0 and up).
    """

    threads: int = 1
    cores: int = 1
    omp_threads: int | None = None
    cuda: bool = False
    matmul_precision: str = "highest"
    tensor_cores: bool = False


def inspection_advice(inspection: Inspection, facts: MachineFacts | None = None) -> list[Finding]:
    """Findings about an inspected target, the gravest first."""
    rows = [row for row in inspection.rows if row.calls]
    facts = facts or machine_facts(rows)
    modules = inspection._modules
    findings = [
        *training_mode(inspection.rows, modules),
        *precision(rows, facts),
        *python_bound(rows, inspection.seconds_per_iteration * inspection.iterations),
        *channels_last(rows, modules),
        *threads(facts),
        *outliers(modules),
    ]
    return ranked(findings)


def tuning_advice(result: TuneResult, stats: Stats | None = None) -> list[Finding]:
    """Findings about a finished tuning, the gravest first; `stats` of calls since then add what they show."""
    findings = calls_of_the_original(stats) if stats is not None else []
    for choice in result.choices:
        signature = result.signatures.get(choice.signature)
        if signature is not None:
            findings += static_dimensions(choice.path, signature)
    findings += small_batches(result)
    findings += disturbances(result)
    end = result.end_to_end
    if end is not None and end.within_budget is False:
        problem = end.comparison.problem if end.comparison is not None else ""
        findings.append(
            Finding(
                "the tuned target as a whole is out of tolerance",
                f"end to end: {problem}, although every module is within its own budget",
                "tighten max_relative_error, or find the module with aitune_lab.bisect(target, candidate, data)",
                kind="end_to_end",
                severity="high",
            )
        )
    return ranked(findings)


def machine_facts(rows: Iterable[ModuleRow] = ()) -> MachineFacts:
    """The facts of this process; rows say whether the target runs on CUDA, which is not started for this."""
    cuda = any(device.startswith("cuda") for row in rows for device in row.devices)
    affinity = getattr(os, "sched_getaffinity", None)
    omp = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return MachineFacts(
        torch.get_num_threads(),
        len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        int(omp) if omp.isdigit() else None,
        cuda,
        torch.get_float32_matmul_precision(),
        cuda and torch.cuda.get_device_capability()[0] >= 8,
    )


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The gravest first, by module after that."""
    return sorted(findings, key=lambda f: (_ORDER.index(f.severity), f.path, f.kind))


def training_mode(rows: Sequence[ModuleRow], modules: Mapping[str, torch.nn.Module]) -> list[Finding]:
    """Modules that ran in training mode: dropout is on, batch norms update, and they can't be tuned."""
    training = [r for r in rows if r.calls and r.path in modules and modules[r.path].training]
    outer = [r for r in training if not any(_beneath(r.path, other.path) for other in training)]
    return [
        Finding(
            "eval mode forgotten",
            f"{row.class_name} ran in training mode: dropout is on, batch norms change with every call",
            f"call .eval() on {row.path or 'the model'} before inspecting and tuning",
            row.path,
            "training_mode",
            "high",
        )
        for row in outer
    ]


def precision(rows: Sequence[ModuleRow], facts: MachineFacts) -> list[Finding]:
    """On a GPU with tensor cores: full float32 products, and float32 weights where half would do."""
    on_cuda = [r for r in rows if any(d.startswith("cuda") for d in r.devices) and "float32" in r.dtypes]
    if not (facts.cuda and facts.tensor_cores and on_cuda):
        return []
    findings = []
    if facts.matmul_precision == "highest":
        findings.append(
            Finding(
                "float32 products run without tensor cores",
                "torch.get_float32_matmul_precision() is 'highest', so no TF32 is used",
                "if a relative error of about 1e-3 is fine, torch.set_float32_matmul_precision('high'), and a plan with "
                "max_relative_error to match",
                kind="matmul_precision",
                severity="low",
            )
        )
    if not any({"float16", "bfloat16"} & set(r.dtypes) for r in rows):
        biggest = max(on_cuda, key=lambda r: r.parameter_bytes)
        findings.append(
            Finding(
                "autocast or half weights forgotten",
                f"all of {biggest.parameter_bytes / 1e6:.0f} MB of weights are float32 on a GPU with tensor cores",
                "try .half() or .to(torch.bfloat16), or run under torch.autocast('cuda'), and check the outputs",
                biggest.path,
                "half_precision",
                "low",
            )
        )
    return findings


def python_bound(rows: Sequence[ModuleRow], seconds: float) -> list[Finding]:
    """Modules whose own time, outside of the modules they call, is large while their tensors are tiny."""
    findings = []
    for row in rows:
        share = row.self_seconds / seconds if seconds > 0 else 0.0
        largest = max((_elements(text) for text in (*row.inputs, *row.outputs)), default=None)
        if share < PYTHON_BOUND_SHARE or largest is None or largest > TINY_ELEMENTS:
            continue
        own_ms = 1000 * row.self_seconds / row.calls
        findings.append(
            Finding(
                "dominated by Python",
                f"{100 * share:.0f} % of the time is {row.class_name}'s own ({own_ms:.3g} ms a call), and no tensor that goes "
                f"in or out has more than {largest} elements",
                "compile it as a whole (a graph has no Python between operators), use larger batches, or on a GPU CUDA graphs",
                row.path,
                "python_bound",
            )
        )
    return findings


def channels_last(rows: Sequence[ModuleRow], modules: Mapping[str, torch.nn.Module]) -> list[Finding]:
    """The outermost module with 2-d convolutions in the default layout that take most of its weights."""
    findings: list[Finding] = []
    for row in sorted(rows, key=lambda r: r.depth):
        module = modules.get(row.path)
        if module is None or not row.tunable or any(row.path == f.path or _beneath(row.path, f.path) for f in findings):
            continue
        convolutions = [m for m in module.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size != (1, 1)]
        held = sum(m.weight.numel() for m in convolutions)
        last = [m for m in convolutions if m.weight.is_contiguous(memory_format=torch.channels_last)]
        strict = [m for m in last if not m.weight.is_contiguous()]
        if len(convolutions) < 2 or strict or held < 0.5 * max(1, row.parameters):
            continue
        findings.append(
            Finding(
                "channels-last worth trying",
                f"{len(convolutions)} convolutions with {100 * held / max(1, row.parameters):.0f} % of the weights run in the "
                "default layout (NCHW)",
                "module.to(memory_format=torch.channels_last), and inputs in the same layout; measure it",
                row.path,
                "channels_last",
                "low",
            )
        )
    return findings


def threads(facts: MachineFacts) -> list[Finding]:
    """More threads than CPUs, or a setting of OpenMP that torch doesn't follow."""
    if facts.threads > facts.cores:
        return [
            Finding(
                "threads oversubscribed",
                f"torch uses {facts.threads} threads and this process may use {facts.cores} CPUs",
                f"torch.set_num_threads({facts.cores}), or give the process more CPUs",
                kind="threads",
                severity="high",
            )
        ]
    if facts.omp_threads is not None and facts.omp_threads > facts.cores:
        return [
            Finding(
                "threads oversubscribed",
                f"OMP_NUM_THREADS is {facts.omp_threads} and this process may use {facts.cores} CPUs",
                f"set OMP_NUM_THREADS={facts.cores} before the process starts",
                kind="threads",
            )
        ]
    return []


def outliers(modules: Mapping[str, torch.nn.Module], ratio: float = OUTLIER_RATIO, limit: int = 3) -> list[Finding]:
    """Linear layers with input channels far larger than the others: what makes int8 with dynamic scales wrong.

    Source: Dettmers et al., *LLM.int8()*, 2022, which sees the effect in activations; large weights of a channel are its
    trace in the parameters.
    """
    found: list[tuple[float, str, torch.nn.Linear, int]] = []
    for path, module in modules.items():
        if not isinstance(module, torch.nn.Linear) or module.weight.is_meta or not module.weight.is_floating_point():
            continue
        peaks = module.weight.detach().abs().amax(dim=0).float()
        middle = float(peaks.median())
        if middle > 0 and math.isfinite(middle):
            worst = int(peaks.argmax())
            found.append((float(peaks[worst]) / middle, path, module, worst))
    found.sort(key=lambda item: -item[0])
    return [
        Finding(
            "outlier channels",
            f"input channel {channel} of {module.in_features} holds weights {by:.0f} times those of the median channel",
            "leave this layer out when quantising to int8 (or quantise weights only), and compare the outputs",
            path,
            "outliers",
        )
        for by, path, module, channel in found[:limit]
        if by >= ratio
    ]


def static_dimensions(path: str, signature: Signature) -> list[Finding]:
    """A first dimension that is one number in all inputs and outputs looks like a batch that was never varied."""
    tensors = [leaf for leaf in (*signature.leaves, *signature.output_leaves) if isinstance(leaf, TensorLeaf)]
    sizes = {leaf.dims[0] if leaf.dims else None for leaf in tensors}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    if not isinstance(size, int) or signature.symbols:
        return []
    return [
        Finding(
            "dynamic shapes never seen",
            f"every recorded call has {size} as the first dimension of all inputs and outputs ({signature.label})",
            "if the batch varies in production, tune with batch_sizes=[...] or declare dynamic_shapes; other sizes run the "
            "original",
            path,
            "static_shapes",
        )
    ]


def calls_of_the_original(stats: Stats) -> list[Finding]:
    """Why calls of tuned modules ran the original since tuning: gradients, training mode, shapes never tuned."""
    findings = []
    for method in stats.methods:
        for reason, calls in method.to_original.items():
            hazard, kind, severity = "calls run the original", "misses", "medium"
            mitigation = "tune with data of this kind"
            if reason == GRADIENTS:
                hazard, kind, severity = "gradients on", "gradients", "high"
                mitigation = "call the target under torch.inference_mode() or torch.no_grad()"
            elif reason == TRAINING:
                hazard, kind, severity = "eval mode forgotten", "training_mode", "high"
                mitigation = f"call .eval() on {method.path or 'the model'}"
            elif reason.startswith("autocast is"):
                hazard, mitigation = "autocast as tuned forgotten", "call it under the autocast context it was tuned in"
            seen = f"{calls} calls of {method.method} ran the original: {reason}"
            findings.append(Finding(hazard, seen, mitigation, method.path, kind, severity))
    return findings


def small_batches(result: TuneResult, symbol: str = "b") -> list[Finding]:
    """Where eager or the chosen candidate does far more items per second at a larger batch size that was measured."""
    findings = []
    for choice in result.choices:
        trial = result.trials.get(choice.trial or "")
        rates: dict[int, float] = {}
        for point in trial.points if trial is not None else ():
            size = point.point.as_dict().get(symbol)
            if size and point.latency is not None and point.latency.median_ms > 0 and not point.latency.disturbed:
                rates[size] = max(rates.get(size, 0.0), 1000 * size / point.latency.median_ms)
        if len(rates) < 2:
            continue
        smallest, best = min(rates), max(rates, key=lambda size: rates[size])
        gain = rates[best] / rates[smallest]
        if best > smallest and gain >= SMALL_BATCH_GAIN:
            findings.append(
                Finding(
                    "batch too small",
                    f"{choice.candidate.label} does {rates[best]:.4g} items/s at batch {best} against {rates[smallest]:.4g} at "
                    f"batch {smallest}, {gain:.1f} times as many",
                    f"collect items to batches of about {best} where latency allows it",
                    choice.path,
                    "batch_size",
                    "low",
                )
            )
    return findings


def disturbances(result: TuneResult) -> list[Finding]:
    """Measurements that other load spoilt, so that they decide nothing."""
    reasons = [
        (trial.path, point.latency.disturbed)
        for trial in result.trials.values()
        for point in trial.points
        if point.latency is not None and point.latency.disturbed
    ]
    if not reasons:
        return []
    path, reason = reasons[0]
    return [
        Finding(
            "measured on a busy machine",
            f"{len(reasons)} measurements were disturbed ({reason}) and decide nothing",
            "stop what else runs, and tune again",
            path,
            "disturbed",
            "high",
        )
    ]


def advice_text(findings: Sequence[Finding]) -> str:
    """Findings as plain text, three lines each."""
    from .text import clean

    lines = []
    for finding in findings:
        where = f" ({finding.path})" if finding.path else ""
        lines += [f"{finding.hazard}{where}", f"  seen: {finding.evidence}", f"  do: {finding.mitigation}"]
    return "\n".join(map(clean, lines)) or "nothing to say"


def _elements(leaf: str) -> int:
    """Elements of a tensor leaf from its label `x: float32[2, 3]`; 0 for other leaves."""
    found = re.search(r"\[([0-9, ]*)\]$", leaf)
    return math.prod(int(n) for n in found[1].split(",") if n.strip()) if found else 0


def _beneath(path: str, other: str) -> bool:
    return path != other and (other == "" or path.startswith(other + "."))
