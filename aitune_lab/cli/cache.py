"""The commands `cache ls`, `cache gc` and `cache path`."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from ..errors import PlanError
from ..store.home import cache_dir
from ..store.store import Collected, Item, Store, Usage
from ..tuning.strategies.words import size
from .output import say


def list_cache(options: argparse.Namespace) -> int:
    """Print what the cache holds, what was used last first."""
    store = Store()
    usage, items = store.usage(), store.items()
    return say(options, asdict(usage) | {"items": [asdict(item) for item in items]}, _listing(usage, items))


def clean_cache(options: argparse.Namespace) -> int:
    """Make room, and print what was removed."""
    if options.limit is not None and not options.limit >= 0:
        raise PlanError(f"--limit must be a number of gigabytes of at least 0, but got {options.limit}")
    store = Store()
    collected = store.collect(round(options.limit * 1e9) if options.limit is not None else None)
    return say(options, asdict(collected) | {"bytes": store.usage().bytes}, _collected(collected, store.usage()))


def print_path(options: argparse.Namespace) -> int:
    """Print the cache folder, whether it exists or not."""
    return say(options, {"path": str(cache_dir())}, cache_dir())


def _listing(usage: Usage, items: list[Item]) -> str:
    lines = [f"{size(usage.bytes)} of at most {size(usage.limit_bytes)} in {usage.folder}"]
    parts = [
        (usage.artifact_bytes, f"{usage.artifacts} artifacts"),
        (usage.database_bytes, f"{usage.trials} trials"),
        (usage.shared_bytes, "compilers' caches"),
        (usage.run_bytes, f"{usage.runs} journals of runs"),
        (usage.work_bytes, "in use by running processes"),
    ]
    lines += [f"  {size(amount):>9}  {what}" for amount, what in parts]
    if items:
        width = max(len(item.label) for item in items)
        lines += ["", f"{'artifact':<{width}}  {'size':>9}  last used"]
    for item in items:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.used))
        lines.append(f"{item.label:<{width}}  {size(item.bytes):>9}  {used}{', in use' if item.in_use else ''}")
    return "\n".join(lines)


def _collected(collected: Collected, usage: Usage) -> str:
    removed = [
        (collected.artifacts, "artifacts"),
        (collected.cache_files, "files of compilers' caches"),
        (collected.runs, "journals of runs"),
        (collected.records, "records"),
        (collected.leftovers, "leftovers of processes that died"),
    ]
    what = ", ".join(f"{count} {name}" for count, name in removed if count) or "nothing"
    kept = f"; {collected.kept_in_use} artifacts stay, as running processes use them" if collected.kept_in_use else ""
    return f"removed {what}, {size(collected.freed_bytes)}; {size(usage.bytes)} are left{kept}"
