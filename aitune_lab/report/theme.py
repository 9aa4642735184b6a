"""Colours, glyphs and patterns of figures: legible on light and on dark pages, and never colour alone.

Fills are the Okabe-Ito palette, which people with any colour vision tell apart. Some of its colours are too pale for
a light page, so every shape has an edge of the same hue that stands out on both pages (WCAG 2.2, 1.4.11: 3 to 1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#111111"
SHAPE_CONTRAST = 3.0
"""What a shape's edge must have against the page."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

ThemeName = Literal["neutral", "light", "dark"]


@dataclass(frozen=True)
class Theme:
    """Colours of what surrounds the data; the page shows through behind it.

    Attributes:
        ink: titles and labels.
        muted: captions and figures beside labels.
        line: axes and reference lines.
        grid: grid lines, faint on purpose.
    """

    name: ThemeName
    ink: str
    muted: str
    line: str
    grid: str


THEMES: dict[ThemeName, Theme] = {
    # Mid-grey is equally far from white and from black: for a page that isn't known.
    "neutral": Theme("neutral", "#767676", "#777777", "#808080", "rgba(128,128,128,0.22)"),
    "light": Theme("light", "#1f2328", "#59636e", "#6e7781", "rgba(31,35,40,0.10)"),
    "dark": Theme("dark", "#e6e8eb", "#a2a9b1", "#8b949e", "rgba(230,232,235,0.14)"),
}


@dataclass(frozen=True)
class Style:
    """How one backend looks: a fill, the edge that makes it stand out, and a glyph (Plotly's names of symbols)."""

    fill: str
    edge: str
    symbol: str

    @property
    def hatch(self) -> str:
        """The colour of a pattern's strokes, which must be seen on the fill."""
        return max((self.edge, mixed(self.fill, "#ffffff", 0.6)), key=lambda colour: contrast(colour, self.fill))


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, 0 (black) to 1 (white), as WCAG 2.2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(colour: str, into: str, share: float) -> str:
    """The colour with a share (0 to 1) of another mixed in, channel by channel."""
    pairs = ((int(colour[i : i + 2], 16), int(into[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def edge_of(fill: str) -> str:
    """The nearest darker shade that stands out on the light page; on the dark page it then does too."""
    shades = (mixed(fill, "#000000", step / 20) for step in range(20))
    return next(shade for shade in shades if contrast(shade, LIGHT_PAGE) >= SHAPE_CONTRAST)


def text_on(fill: str) -> str:
    """Black or white, whichever reads better on a fill."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, fill))


EAGER = "eager"
_PALETTE = {
    EAGER: ("#999999", "circle"),
    "onnxruntime": ("#0072b2", "square"),
    "inductor": ("#e69f00", "diamond"),
    "inductor_aot": ("#d55e00", "triangle-up"),
    "openvino": ("#56b4e9", "triangle-down"),
    "tensorrt": ("#009e73", "pentagon"),
    "torchao": ("#cc79a7", "hexagon"),
    "torch_tensorrt": ("#f0e442", "star"),
}
STYLES = {name: Style(fill, edge_of(fill), symbol) for name, (fill, symbol) in _PALETTE.items()}
_OTHERS = tuple(style for name, style in STYLES.items() if name != EAGER)
_KIN = ("torch_tensorrt",)
"""Families of backends that share a style."""

PATTERNS = ("", "/", "x", "-", "\\", "+", ".", "|")
"""Plotly's names of bar patterns, for the variants of one backend."""


def style_of(backend: str) -> Style:
    """The style of a backend by its registered name; one that isn't known gets one of the others', always the same."""
    if backend in STYLES:
        return STYLES[backend]
    kin = next((name for name in _KIN if backend.startswith(name)), None)
    if kin is not None:
        return STYLES[kin]
    return _OTHERS[hashlib.sha256(backend.encode()).digest()[0] % len(_OTHERS)]


def patterns_of(candidates: Iterable[tuple[str, str]]) -> dict[str, str]:
    """A pattern for each label among (backend, label): solid for a backend's plain form, another for each variant."""
    patterns: dict[str, str] = {}
    seen: dict[Style, int] = {}
    for backend, label in sorted(candidates, key=lambda pair: pair[1]):  # the plain form has the shortest label
        if label not in patterns:
            number = seen.get(style_of(backend), 0)
            patterns[label] = PATTERNS[number % len(PATTERNS)]
            seen[style_of(backend)] = number + 1
    return patterns


def theme_of(theme: Theme | ThemeName) -> Theme:
    """A theme by name. Raises KeyError for a name that isn't known."""
    return theme if isinstance(theme, Theme) else THEMES[theme]
