"""A small writer of SVG: shapes, text, hatching, glyphs. Every text in it is untrusted.

Colours of text and lines are set twice: by a class, which a page's style may colour for light and dark, and by an
attribute in mid-grey, which reads on both where there is no style (an `<img>` in a saved notebook).
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .text import clean
from .theme import FONT, THEMES, Style

CHARACTER = 0.53
"""Mean width of a character over the font size."""
_NEUTRAL = THEMES["neutral"]
_COLOURS = {"ink": _NEUTRAL.ink, "muted": _NEUTRAL.muted, "line": _NEUTRAL.line, "grid": "#808080"}
_SIDES = {"square": (4, 45.0), "diamond": (4, 0.0), "triangle-up": (3, 0.0), "triangle-down": (3, 180.0)}
_SIDES |= {"pentagon": (5, 0.0), "hexagon": (6, 0.0)}


@dataclass
class Picture:
    """An SVG being written, `width` × `height` in pixels. `alt` tells in words what it shows."""

    width: float
    height: float
    alt: str = ""
    parts: list[str] = field(default_factory=list)
    _hatches: dict[str, str] = field(default_factory=dict)

    def svg(self) -> str:
        """The element, fit for a page or a file of its own."""
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        box = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        kind = f'xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{safe(self.alt)}"'
        defs = f"<defs>{''.join(self._hatches.values())}</defs>" if self._hatches else ""
        return f'<svg {kind} {size} {box} font-family="{safe(FONT)}">{defs}{"".join(self.parts)}</svg>'

    def image(self) -> str:
        """An `<img>` that holds the picture itself, as bare HTML may."""
        data = base64.b64encode(self.svg().encode()).decode()
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        return f'<img src="data:image/svg+xml;base64,{data}" {size} alt="{safe(self.alt)}">'

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        tone: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        room: float | None = None,
        tip: str = "",
        colour: str = "",
    ) -> None:
        """Text at its baseline; cut where it would be wider than `room` pixels, and then told in full by a tip."""
        shown = clean(text)
        if room is not None:
            longest = max(int(room / (CHARACTER * size)), 1)
            if len(shown) > longest:
                tip, shown = tip or shown, shown[: longest - 1].rstrip() + "…"
        weight = ' font-weight="600"' if bold else ""
        look = f'fill="{colour}"' if colour else toned(tone, "fill")
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}"'
        self.parts.append(f"<text {place} {look}{weight}>{safe(shown)}{_tip(tip)}</text>")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, tone: str = "line", dash: bool = False, width: float = 1.2
    ) -> None:
        """A straight line; dashed for references."""
        ends = " ".join(f'{k}="{number(v)}"' for k, v in (("x1", x1), ("y1", y1), ("x2", x2), ("y2", y2)))
        dashes = ' stroke-dasharray="5 4"' if dash else ""
        faint = ' stroke-opacity="0.25"' if tone == "grid" else ""
        self.parts.append(f'<line {ends} {toned(tone, "stroke")} stroke-width="{number(width)}"{dashes}{faint}/>')

    def polyline(self, points: Iterable[tuple[float, float]], *, tone: str = "line") -> None:
        """A line through points."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" {toned(tone, "stroke")} stroke-width="1.4"/>')

    def bar(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: Style,
        *,
        pattern: str = "",
        faint: bool = False,
        hollow: bool = False,
        tip: str = "",
    ) -> None:
        """A bar in a backend's style; `pattern` is one of `theme.PATTERNS`, `hollow` hatches nothing but the page."""
        place = " ".join(
            f'{k}="{number(v)}"'
            for k, v in (("x", x), ("y", y), ("width", max(width, 1.0)), ("height", height), ("rx", 2))
        )
        opacity = ' opacity="0.5"' if faint else ""
        fill = f"url(#{self._hatch(style, pattern, hollow)})" if pattern else style.fill
        self.parts.append(
            f'<rect {place} fill="{fill}" stroke="{style.edge}" stroke-width="1.2"{opacity}>{_tip(tip)}</rect>'
        )

    def whisker(self, low: float, high: float, y: float, end: float, *, edge: str = "") -> None:
        """An interval with caps; one that goes beyond `end` is cut there and has no cap."""
        look = f'stroke="{edge}"' if edge else toned("line", "stroke")
        cut = min(high, end)
        path = f"M{number(low)} {number(y - 4)}v8M{number(low)} {number(y)}H{number(cut)}"
        if high <= end:
            path += f"M{number(cut)} {number(y - 4)}v8"
        self.parts.append(f'<path d="{path}" fill="none" {look} stroke-width="1.4"/>')

    def glyph(self, x: float, y: float, symbol: str, style: Style, *, radius: float = 6.5, tip: str = "") -> None:
        """A marker by Plotly's name of its symbol; a cross for `x`, a ring for `circle-open`."""
        look = f'fill="{style.fill}" stroke="{style.edge}" stroke-width="1.4"'
        if symbol == "x":
            r = radius * 0.8
            path = f"M{number(x - r)} {number(y - r)}L{number(x + r)} {number(y + r)}M{number(x - r)} {number(y + r)}L{number(x + r)} {number(y - r)}"
            self.parts.append(f'<path d="{path}" stroke="{style.edge}" stroke-width="3">{_tip(tip)}</path>')
        elif symbol in ("circle", "circle-open"):
            look = look if symbol == "circle" else f'fill="none" {toned("line", "stroke")} stroke-width="1.4"'
            place = f'cx="{number(x)}" cy="{number(y)}" r="{number(radius * 0.85)}"'
            self.parts.append(f"<circle {place} {look}>{_tip(tip)}</circle>")
        else:
            points = " ".join(f"{number(px)},{number(py)}" for px, py in _outline(x, y, symbol, radius))
            self.parts.append(f'<polygon points="{points}" {look}>{_tip(tip)}</polygon>')

    def _hatch(self, style: Style, pattern: str, hollow: bool) -> str:
        name = f"hatch-{style.fill[1:]}-{ord(pattern)}{'-hollow' if hollow else ''}"
        strokes = {
            "/": "M-2 2l4-4M0 8l8-8M6 10l4-4",
            "\\": "M-2 6l4 4M0 0l8 8M6-2l4 4",
            "x": "M0 8l8-8M0 0l8 8",
            "-": "M0 4h8",
            "|": "M4 0v8",
            "+": "M0 4h8M4 0v8",
            ".": "M3 4h2",
        }[pattern]
        colour = style.edge if hollow else style.hatch
        body = f'<path d="{strokes}" stroke="{colour}" stroke-width="2"/>'
        if not hollow:
            body = f'<rect width="8" height="8" fill="{style.fill}"/>{body}'
        self._hatches[name] = (
            f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{body}</pattern>'
        )
        return name


def toned(tone: str, attribute: str) -> str:
    """A class and its mid-grey: `class="ink" fill="#767676"`. Lines have classes of their own."""
    name = tone if attribute == "fill" else f"{tone}-line"
    return f'class="{name}" {attribute}="{_COLOURS[tone]}"'


def safe(text: str) -> str:
    """Untrusted text for XML and HTML, with control characters shown."""
    return html.escape(clean(text))


def number(value: float) -> str:
    """A coordinate, in hundredths of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


def ticks(end: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to `end`, about `count` of them."""
    if not (math.isfinite(end) and end > 0):
        return [0.0]
    rough = end / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [step * i for i in range(int(end / step + 1e-9) + 1)]


def _tip(text: str) -> str:
    return f"<title>{safe(text)}</title>" if text else ""


def _outline(x: float, y: float, symbol: str, radius: float) -> list[tuple[float, float]]:
    if symbol == "star":
        spokes = [(radius * (1.15 if i % 2 == 0 else 0.5), 36.0 * i) for i in range(10)]
    else:
        sides, turn = _SIDES.get(symbol, (4, 45.0))
        spokes = [(radius * (1.15 if sides <= 4 else 1.0), turn + 360.0 * i / sides) for i in range(sides)]
    return [(x + r * math.sin(math.radians(a)), y - r * math.cos(math.radians(a))) for r, a in spokes]
