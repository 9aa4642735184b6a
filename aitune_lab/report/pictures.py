"""A run's figures as SVG, for saved notebooks and reports: drawn from the same data as the Plotly figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from ..tuning.strategies.words import error, milliseconds
from .figures.difference import DifferenceInfo, axis_range, on_axis
from .figures.endtoend import AFTER, BEFORE, EndInfo, end_ms as end_axis_ms
from .figures.latency import LatencyInfo
from .figures.pareto import SIDES, ParetoInfo, end_ms as pareto_axis_ms, error_range, label_sides
from .figures.timeline import PHASE_PATTERNS, PHASES, TimelineInfo
from .figures.where import MAX_LEVELS, Region, WhereInfo, fill_of, levels_of
from .svg import Picture, ticks
from .theme import EAGER, STYLES, Style, edge_of, patterns_of, style_of, text_on

WIDTH = 720.0
LEFT, RIGHT, TOP, AXIS = 222.0, 16.0, 6.0, 40.0
ROW, BAR = 38.0, 20.0


def latency_picture(info: LatencyInfo) -> Picture:
    """Bars of medians with their intervals, eager's as a dashed line; a sentence in place of a bar that is missing."""
    alt = f"{info.title}: " + "; ".join(f"{bar.label} {bar.figures}" for bar in info.bars)
    picture = Picture(WIDTH, TOP + ROW * len(info.bars) + AXIS, alt)
    to_x = _linear(info.end_ms)
    bottom = TOP + ROW * len(info.bars)
    _axis(picture, ticks(info.end_ms), to_x, bottom, "milliseconds a call")
    patterns = patterns_of((bar.backend, bar.label) for bar in info.timed)
    for row, bar in enumerate(info.bars):
        y = TOP + ROW * row
        _name(picture, y, bar.label, bar.figures if bar.median_ms is not None else "", bar.chosen)
        if bar.median_ms is None:
            picture.text(LEFT + 6, y + 23, bar.figures, size=11, tone="muted", room=WIDTH - LEFT - RIGHT - 6)
            continue
        tip = f"{bar.label}: {bar.measured}" if bar.measured is not None else bar.label
        faint = bar.wrong or bool(bar.disturbed)
        width = to_x(bar.median_ms) - LEFT
        style, pattern = style_of(bar.backend), patterns[bar.label]
        picture.bar(LEFT, y + (ROW - BAR) / 2, width, BAR, style, pattern=pattern, faint=faint, tip=tip)
        picture.whisker(to_x(bar.low_ms), to_x(bar.high_ms), y + ROW / 2, WIDTH - RIGHT)
    if info.eager_ms is not None:
        x = to_x(info.eager_ms)
        picture.line(x, TOP, x, TOP + ROW * len(info.timed), dash=True)
    return picture


def difference_picture(info: DifferenceInfo) -> Picture:
    """Errors on a log axis: each candidate's glyph, the tick of what is allowed, the ring of eager's own, the budget."""
    alt = f"{info.title}: " + "; ".join(f"{info.name_of(row)} {row.figures}" for row in info.rows)
    picture = Picture(WIDTH, TOP + ROW * len(info.rows) + AXIS, alt)
    low, high = axis_range(info)
    to_x = _log(low, high, LEFT + 8, WIDTH - RIGHT)
    bottom = TOP + ROW * len(info.rows)
    _axis(picture, _decades(low, high), to_x, bottom, "relative L2 error", _power)
    if info.budget > 0:
        picture.line(to_x(on_axis(info.budget)), TOP, to_x(on_axis(info.budget)), bottom, dash=True, tone="ink")
    for row, item in enumerate(info.rows):
        y = TOP + ROW * row
        _name(picture, y, info.name_of(item), item.figures, item.chosen)
        middle, style = y + ROW / 2, style_of(item.backend)
        if item.allowed > 0:
            x = to_x(on_axis(item.allowed))
            picture.line(x, middle - 8, x, middle + 8, width=1.6)
        if item.eager > 0:
            picture.glyph(to_x(on_axis(item.eager)), middle, "circle-open", style, radius=5)
        symbol = "x" if item.error_class == "refused" else style.symbol
        picture.glyph(to_x(on_axis(item.relative_l2)), middle, symbol, style, tip=f"{item.label}: {item.figures}")
    return picture


def pareto_picture(info: ParetoInfo) -> Picture:
    """Latency to the right, error upward: the best are at the lower left, joined by the front."""
    alt = f"{info.title}: " + "; ".join(f"{point.label} {point.figures}" for point in info.points)
    left, bottom, top = 64.0, 260.0, 10.0
    picture = Picture(WIDTH, bottom + AXIS, alt)
    end = pareto_axis_ms(info)
    to_x = _linear(end, left)
    low, high = error_range(info)
    upward = _log(low, high, bottom, top)
    for value in _decades(low, high):
        picture.line(left, upward(value), WIDTH - RIGHT, upward(value), tone="grid")
        picture.text(left - 8, upward(value) + 4, _power(value), size=11, tone="muted", anchor="end")
    _axis(picture, ticks(end), to_x, bottom, "milliseconds a call; upward: relative L2 error", left=left, top=top)
    if info.budget > 0:
        y = upward(on_axis(info.budget))
        picture.line(left, y, WIDTH - RIGHT, y, dash=True, tone="ink")
        picture.text(WIDTH - RIGHT, y - 5, f"budget {error(info.budget)}", size=11, tone="muted", anchor="end")
    places = [(to_x(point.median_ms), upward(on_axis(point.relative_l2))) for point in info.front]
    steps = [place for a, b in pairwise(places) for place in (a, (b[0], a[1]))] + places[-1:]
    if len(steps) > 1:
        picture.polyline(steps)
    sides = label_sides(info, WIDTH - RIGHT - left, bottom - top)
    for point in info.points:
        x, y, style = to_x(point.median_ms), upward(on_axis(point.relative_l2)), style_of(point.backend)
        picture.whisker(to_x(point.low_ms), to_x(point.high_ms), y, WIDTH - RIGHT, edge=style.edge)
        picture.glyph(x, y, style.symbol if point.right else "x", style, tip=f"{point.label}: {point.figures}")
        name = f"{point.label} ✓" if point.chosen else point.label
        tone = "ink" if point.front else "muted"
        side, down = SIDES.get(sides[point.label], (0, 0))
        if side:
            anchor = "start" if side > 0 else "end"
            picture.text(x + 9 * side, y + down, name, size=11, tone=tone, bold=point.chosen, anchor=anchor)
    return picture


def where_picture(info: WhereInfo) -> Picture:
    """The module tree by time as an icicle, untuned above, tuned beneath on the same scale."""
    level, gap = 26.0, 22.0
    trees = [tree for tree in (info.eager, info.tuned) if tree]
    height = sum(level * levels_of(tree) + gap for tree in trees)
    alt = f"{info.title}: " + " ".join(info.caption)
    picture = Picture(WIDTH, height, alt)
    scale = (WIDTH - 2) / info.eager_ms if info.eager_ms > 0 else 0.0
    top = 0.0
    for tree, name in zip(trees, ("untuned", "tuned, estimate"), strict=False):
        picture.text(1, top + 13, f"{name} {milliseconds(tree[0].ms)}", size=11, tone="muted")
        top += gap - 4
        _icicle(picture, tree, 1.0, top, level, scale, info.eager_ms)
        top += level * levels_of(tree) + 4
    return picture


def timeline_picture(info: TimelineInfo) -> Picture:
    """A row for each trial, its phases as bars in seconds since the start, and how it ended."""
    alt = f"{info.title}: " + " ".join(info.caption)
    row_height, legend = 22.0, 24.0
    bottom = legend + row_height * len(info.spans)
    picture = Picture(WIDTH, bottom + AXIS, alt)
    left = 240.0
    end = 1.02 * info.seconds or 1.0
    to_x = _linear(end, left)
    used = [phase for phase in PHASES if any(part.name == phase for span in info.spans for part in span.phases)]
    for number, phase in enumerate(used):
        picture.bar(left + 90 * number, 4, 12, 12, PHASES[phase], pattern=PHASE_PATTERNS[phase])
        picture.text(left + 90 * number + 18, 14, phase, size=11, tone="muted")
    _axis(picture, ticks(end), to_x, bottom, "seconds since the start", left=left, top=legend)
    for number, span in enumerate(info.spans):
        y = legend + row_height * number
        picture.text(left - 8, y + 15, span.name, size=11, anchor="end", room=left - 12)
        for part in span.phases:
            tip = f"{span.name}: {part.name} {part.end - part.start:.3g} s"
            x, style = to_x(part.start), PHASES[part.name]
            pattern = PHASE_PATTERNS[part.name]
            picture.bar(x, y + 5, to_x(part.end) - x, row_height - 10, style, pattern=pattern, tip=tip)
        if span.status == "running":
            continue
        tip = f"{span.name}: {span.status}{f': {span.reason}' if span.reason else ''}"
        symbol, style = ("circle", STYLES[EAGER]) if span.status == "ok" else ("x", STYLES["inductor_aot"])
        picture.glyph(to_x(span.end) + 6, y + row_height / 2, symbol, style, radius=4.5, tip=tip)
    return picture


def end_picture(info: EndInfo) -> Picture:
    """The whole target before and after; hatched where it is an estimate."""
    alt = f"{info.title}: " + "; ".join(f"{bar.name} {milliseconds(bar.ms)}" for bar in info.bars)
    bottom = TOP + ROW * len(info.bars)
    picture = Picture(WIDTH, bottom + AXIS, alt)
    end = end_axis_ms(info)
    to_x = _linear(end)
    _axis(picture, ticks(end), to_x, bottom, "milliseconds a pass over the data")
    for row, bar in enumerate(info.bars):
        y = TOP + ROW * row
        _name(picture, y, bar.name, milliseconds(bar.ms), False)
        style = AFTER if bar.tuned else BEFORE
        tip = str(bar.measured) if bar.measured is not None else ""
        hatch = "/" if bar.estimated else ""
        width = to_x(bar.ms) - LEFT
        picture.bar(LEFT, y + (ROW - BAR) / 2, width, BAR, style, pattern=hatch, hollow=bar.estimated, tip=tip)
        if bar.low_ms is not None and bar.high_ms is not None:
            picture.whisker(to_x(bar.low_ms), to_x(bar.high_ms), y + ROW / 2, WIDTH - RIGHT)
    return picture


def _icicle(
    picture: Picture, tree: Sequence[Region], left: float, top: float, level: float, scale: float, whole_ms: float
) -> None:
    children: dict[str, list[Region]] = {}
    for region in tree[1:]:
        children.setdefault(region.parent or "", []).append(region)

    def draw(region: Region, x: float, depth: int) -> None:
        width, y, fill = region.ms * scale, top + level * depth, fill_of(region)
        share = f"{100 * region.ms / whole_ms:.1f} % of the untuned whole" if whole_ms > 0 else ""
        tuned = f", tuned: {region.candidate}" if region.candidate else ""
        tip = f"{region.key or region.name} {region.class_name}: {milliseconds(region.ms)}, {share}{tuned}"
        picture.bar(x, y, max(width - 1, 0.5), level - 2, Style(fill, edge_of(fill), ""), tip=tip)
        if width > 34:
            name = f"{region.name} · {region.candidate}" if region.candidate else region.name
            picture.text(x + 6, y + level / 2 + 3, name, size=11, colour=text_on(fill), room=width - 10, tip=tip)
        if depth + 1 < MAX_LEVELS:
            for child in children.get(region.key, ()):
                draw(child, x, depth + 1)
                x += child.ms * scale

    draw(tree[0], left, 0)


def _name(picture: Picture, y: float, name: str, figures: str, marked: bool) -> None:
    shown = f"{name} ✓" if marked else name
    middle = y + ROW / 2
    if figures:
        picture.text(LEFT - 10, middle - 2, shown, anchor="end", bold=marked, room=LEFT - 14)
        picture.text(LEFT - 10, middle + 12, figures, size=11, tone="muted", anchor="end", room=LEFT - 12)
    else:
        picture.text(LEFT - 10, middle + 4, shown, anchor="end", bold=marked, room=LEFT - 14)


def _axis(
    picture: Picture,
    values: Sequence[float],
    to_x: Callable[[float], float],
    bottom: float,
    title: str,
    words: Callable[[float], str] = "{:.6g}".format,
    *,
    left: float = LEFT,
    top: float = TOP,
) -> None:
    for value in values:
        picture.line(to_x(value), top, to_x(value), bottom, tone="grid")
        picture.text(to_x(value), bottom + 16, words(value), size=11, tone="muted", anchor="middle")
    picture.line(left, top, left, bottom)
    picture.line(left, bottom, WIDTH - RIGHT, bottom)
    picture.text((left + WIDTH - RIGHT) / 2, bottom + 34, title, size=11, tone="muted", anchor="middle")


def _linear(end: float, left: float = LEFT) -> Callable[[float], float]:
    """Pixels of a value on an axis that starts at 0; whatever lies beyond it stands at its end."""
    return lambda value: left + (WIDTH - RIGHT - left) * min(max(value / end, 0.0), 1.02)


def _log(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = math.log10(high / low)
    return lambda value: start + (end - start) * math.log10(value / low) / span


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten between two bounds, at most about eight."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    step = max(1, math.ceil((last - first) / 8))
    return [10.0**power for power in range(first, last + 1, step)]


def _power(value: float) -> str:
    """A power of ten as axes name it: `1e-4`, `1`."""
    power = round(math.log10(value))
    return f"1e{power}" if power else "1"
