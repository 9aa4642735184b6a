"""What people see of a session: tables as text and HTML, data frames."""

from __future__ import annotations

from . import figures, observed, profiles, runs, whatifs
from .advice import Finding, advice_text, inspection_advice, tuning_advice
from .code import as_code
from .frames import choices_frame, events_frame, modules_frame, trials_frame
from .html import html_report, report_page
from .results import CHOICE_COLUMNS, Block, candidates_block, choice_rows, result_blocks, result_html, result_text
from .static import static_html
from .text import (
    CANDIDATE_COLUMNS,
    MODULE_COLUMNS,
    Column,
    candidate_rows,
    clean,
    html_table,
    module_rows,
    render_table,
)

__all__ = [
    "CANDIDATE_COLUMNS",
    "CHOICE_COLUMNS",
    "MODULE_COLUMNS",
    "Block",
    "Column",
    "Finding",
    "advice_text",
    "as_code",
    "candidate_rows",
    "candidates_block",
    "choice_rows",
    "choices_frame",
    "clean",
    "events_frame",
    "inspection_advice",
    "figures",
    "html_report",
    "html_table",
    "module_rows",
    "modules_frame",
    "observed",
    "profiles",
    "render_table",
    "report_page",
    "result_blocks",
    "result_html",
    "result_text",
    "static_html",
    "runs",
    "trials_frame",
    "tuning_advice",
    "whatifs",
]
