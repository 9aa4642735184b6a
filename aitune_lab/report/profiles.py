"""Where a target's time goes: regions eager against tuned, and their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tuning.mixes import Bounded
from ..tuning.profile import Profile, Region
from ..tuning.regions import Kernel
from ..tuning.strategies.words import number, times
from .frames import frame_of
from .results import Block, blocks_html, blocks_text
from .text import Column

SHOWN_KERNELS = 12
"""Rows of kernels for each run; the frame has them all."""

REGION_COLUMNS = (
    Column("path", "region"),
    Column("kind", "kind"),
    Column("calls", "calls", right=True),
    Column("eager", "eager ms", right=True),
    Column("eager_share", "share", right=True),
    Column("tuned", "tuned ms", right=True),
    Column("tuned_share", "share", right=True),
    Column("speedup", "speed-up", right=True),
)
KERNEL_COLUMNS = (
    Column("region", "region"),
    Column("name", "operation"),
    Column("calls", "calls", right=True),
    Column("cpu", "CPU ms", right=True),
    Column("device", "GPU ms", right=True),
    Column("launched", "kernels"),
)
_KINDS = {"tuned": "tuned", "untuned": "untuned", "around": "own code", "outside": "Python"}
_REGIONS = (
    "path kind candidates calls eager_ms eager_low_ms eager_high_ms tuned_ms tuned_low_ms tuned_high_ms speedup "
    "eager_share tuned_share"
).split()
_KERNELS = "region run name calls cpu_ms device_ms launched".split()


def regions_frame(regions: Sequence[Region]) -> Any:
    """Regions as a data frame, one row each. Raises MissingDependency without pandas."""
    rows = []
    for region in regions:
        row: dict[str, Any] = {name: getattr(region, name, None) for name in _REGIONS}
        row["candidates"] = "; ".join(region.candidates)
        for run, figure in (("eager", region.eager), ("tuned", region.tuned)):
            if figure is not None:
                row |= {f"{run}_ms": figure.ms, f"{run}_low_ms": figure.low_ms, f"{run}_high_ms": figure.high_ms}
        rows.append(row)
    return frame_of(rows, _REGIONS)


def kernels_frame(kernels: Sequence[Kernel]) -> Any:
    """Kernels as a data frame, one row each. Raises MissingDependency without pandas."""
    rows = [{name: getattr(k, name) for name in _KERNELS} | {"launched": "; ".join(k.launched)} for k in kernels]
    return frame_of(rows, _KERNELS)


def region_rows(regions: Sequence[Region]) -> list[dict[str, str]]:
    """Regions as formatted cells of `REGION_COLUMNS`."""
    return [
        {
            "path": region.path or "(model)",
            "kind": ", ".join((_KINDS[region.kind], *region.candidates)),
            "calls": f"{region.calls:,}" if region.calls else "",
            "eager": _ms(region.eager),
            "eager_share": _percent(region.eager_share),
            "tuned": _ms(region.tuned),
            "tuned_share": _percent(region.tuned_share),
            "speedup": f"×{times(region.speedup)}" if region.speedup is not None and region.kind == "tuned" else "",
        }
        for region in regions
    ]


def kernel_rows(kernels: Sequence[Kernel]) -> list[dict[str, str]]:
    """Kernels as formatted cells of `KERNEL_COLUMNS`."""
    return [
        {
            "region": kernel.region or "(model)",
            "name": kernel.name,
            "calls": f"{kernel.calls:,}",
            "cpu": number(kernel.cpu_ms),
            "device": "" if kernel.device_ms is None else number(kernel.device_ms),
            "launched": ", ".join(kernel.launched),
        }
        for kernel in kernels
    ]


def profile_blocks(profile: Profile) -> list[Block]:
    """The whole pass, the regions, the longest kernels of each run, what limits the figures."""
    blocks = [Block("", lines=[profile.understood])] if profile.understood else []
    whole = f"one pass: {profile.eager} in eager"
    if profile.tuned is not None and profile.speedup is not None:
        whole += f", {profile.tuned} as tuned: {times(profile.speedup)} times as fast"
    lines = [f"{whole}; median of {profile.passes} pass{'' if profile.passes == 1 else 'es'} with 95 % bounds"]
    blocks.append(Block("Where the time goes", REGION_COLUMNS, region_rows(profile.regions), lines))
    for run in ("eager", "tuned"):
        held = [kernel for kernel in profile.kernels if kernel.run == run]
        if held:
            rest = len(held) - SHOWN_KERNELS
            more = [f"and {rest} more in .kernels_frame()"] if rest > 0 else []
            title = f"Longest operations, {run} (one pass under torch's profiler)"
            blocks.append(Block(title, KERNEL_COLUMNS, kernel_rows(held[:SHOWN_KERNELS]), more))
    if profile.notes:
        blocks.append(Block("", lines=[f"note: {note}" for note in profile.notes]))
    return blocks


def profile_text(profile: Profile) -> str:
    return blocks_text(profile_blocks(profile))


def profile_html(profile: Profile) -> str:
    return blocks_html(profile_blocks(profile))


def _ms(figure: Bounded | None) -> str:
    if figure is None:
        return ""
    return f"{number(figure.ms)} ({number(figure.low_ms)} to {number(figure.high_ms)})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
