"""The dispatch of one tuned method: which executable a call goes to, and when the original runs instead."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.fx._symbolic_trace

from ..capture.calls import CallForm
from ..capture.recorder import autocast_state
from ..capture.structure import Flat, flatten_call, is_tensor, value_text
from ..capture.swap import SwappedMethod, original_method, restore, swap
from ..errors import AituneWarning, SignatureMiss
from ..schema import OpaqueLeaf, Signature, TensorLeaf, ValueLeaf, leaf_label
from . import ranges
from .codegen import FILENAME, FunctionWriter
from .counter import Counter
from .guard import TensorCheck
from .originals import Dropped, Originals, Parked
from .weights import WeightWatch, content_digest

if TYPE_CHECKING:
    from .installed import InstalledExecutable

MAX_REASONS = 32
EXPLAINED_MISSES = 200
TRAINING = "the module is in training mode; call .eval() on it to use the tuned executable"
GRADIENTS = (
    "gradients are wanted here; call it under torch.inference_mode() or torch.no_grad() to use the tuned executable"
)


_MISS = "miss"


def _warn(message: str) -> None:
    """A warning that points at the user's line, whatever of ours and of torch's lies between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (
        frame.f_code.co_filename == FILENAME or frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, AituneWarning, stacklevel=level)


_BETWEEN = (__name__.partition(".")[0], "torch", "accelerate")


@dataclass
class Entry:
    """One signature's executable inside a dispatch."""

    installed: InstalledExecutable
    hits: Counter = field(default_factory=Counter)
    digest: str | None = None
    """Content digest of the weights that the executable has baked; None if it reads them live."""
    stale: bool = False
    _uncovered_before: int = 0

    def uncovered(self) -> int:
        """Calls since the counts were last reset that the executable handed back to the original."""
        counted = self.installed.executable.uncovered
        return counted() - self._uncovered_before if counted is not None else 0

    def reset_counts(self) -> None:
        """Count from 0: what was called before was not the user's."""
        self.hits.reset()
        self._uncovered_before += self.uncovered()


class MethodDispatch:
    """Swaps one method of one module for generated code that dispatches to executables.

    The rule: a call gives what the original gives, or runs the original. Thread-safe and reentrant.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        method: str,
        name: str,
        installed: list[InstalledExecutable],
        *,
        on_miss: Literal["original", "error"] = "original",
        weights: Literal["watched", "frozen"] = "watched",
        originals: Originals = "device",
    ) -> None:
        self.module, self.method, self.name, self.on_miss = module, method, name, on_miss
        self.original = original_method(module, method)
        self.form = CallForm(self.original)
        self.originals = originals
        if originals == "cpu":
            self.original = Parked(module, self.original)
        elif originals == "drop":
            self.original = Dropped(name, [item.signature for item in installed])
        self.entries = [Entry(item) for item in installed]
        for entry in self.entries:
            entry.reset_counts()
        self.misses = Counter()
        self.to_original: dict[str, int] = {}
        self._said: set[str] = set()
        self._lock = threading.RLock()
        baked = not all(item.executable.live_weights for item in installed)
        by_address = any(item.executable.moved is not None for item in installed)
        state = {name for item in installed for name in item.signature.facts.state}
        self.watch = (
            WeightWatch(module, values=baked, addresses=by_address, state=state)
            if weights == "watched" and originals == "device"
            else None
        )
        # Those that are to be freed must not be held.
        self._weights = [*module.parameters(), *module.buffers()] if originals != "drop" else []
        for entry in self.entries:
            if self.watch is not None and not entry.installed.executable.live_weights:
                entry.digest = content_digest(module)
            if self.watch is not None and self._moved(entry):
                entry.stale = True
                self.watch.mark("weights were moved")
        self._swap: SwappedMethod | None = None
        self.slots: list[ranges.Slot] = []
        # Generated before anything is swapped: what can't be generated must leave the module as it was.
        self.call = self._generate()

    def install(self) -> None:
        if self.watch is not None:
            self.watch.start()
        self._swap = swap(self.module, self.method, self.call)
        ranges.installed(self)

    def uninstall(self) -> None:
        if self._swap is not None:
            restore(self._swap)
            self._swap = None
        ranges.uninstalled(self)
        if self.watch is not None:
            self.watch.stop()

    def _generate(self) -> Callable[..., Any]:
        following: Callable[..., Any] = self._missed
        for index in reversed(range(len(self.entries))):
            following = self._generate_entry(index, following, head=index == 0)
        return following

    def _generate_entry(self, index: int, following: Callable[..., Any], *, head: bool) -> Callable[..., Any]:
        entry = self.entries[index]
        signature, executable = entry.installed.signature, entry.installed.executable
        w = FunctionWriter(self.form)
        passed = w.forwarded()
        miss = f"return {w.name(following)}({passed})"
        original = f"return {w.name(self.original)}({passed})"
        if head:
            tests = [
                f"{w.name(torch.compiler.is_dynamo_compiling)}()",
                f"{w.name(torch._C._functorch.peek_interpreter_stack)}() is not None",
                f"{w.name(torch._C._len_torch_dispatch_stack)}()",
                f"{w.name(torch._C._len_torch_function_stack)}()",
                f"{w.name(torch._C._get_tracing_state)}() is not None",
            ]
            w.lines.append(f"if {' or '.join(tests)}: {original}")
            w.lines.append(f"if {w.name(self.module.__dict__)}['training']:")
            w.lines += [f"  {w.name(self._note)}({w.name(TRAINING)})", f"  {original}"]
        any_autocast = w.name(torch._C._is_any_autocast_enabled)
        if signature.autocast:
            state = w.name(autocast_state)
            w.lines.append(f"if not {any_autocast}() or {state}() != {signature.autocast!r}: {miss}")
        else:
            w.lines.append(f"if {any_autocast}(): {miss}")
        w.take_apart(signature, miss)
        tensors = list(w.tensors)
        if tensors:
            self._emit_tensor_check(w, signature, tensors, miss)
        if executable.flat:
            w.check_identity(signature, miss)
            w.check_contiguity(signature, miss)
        grad = w.name(torch.is_grad_enabled)
        wanted = w.name(self._wants_gradients)
        w.lines.append(f"if {grad}() and {wanted}(({''.join(t + ', ' for t in tensors)})): {original}")
        if self.watch is not None:
            settled = w.name(self._holds)
            w.lines.append(f"if not {w.name(self.watch.tick)}() and not {settled}({index}): {original}")
        count = f"{w.name(next)}({w.name(entry.hits.count)})"
        run = w.name(executable.call)
        if executable.flat:
            results, error = w.name(), w.name()
            w.lines.append(f"try: {results} = {run}({', '.join(tensors)})")
            # Nothing was written yet, so the original can still answer.
            w.lines.append(f"except {w.name(Exception)} as {error}:")
            w.lines += [f"  {w.name(self._note_failure)}({index}, {error})", f"  {original}", count]
            output = w.build_outputs(signature, results)
            w.lines.append(f"return {output}")
        else:
            w.lines += [count, f"return {run}({passed})"]
        label = entry.installed.choice.candidate.label
        self.slots.append(ranges.Slot(w.namespace, run, f"aitune_lab {self.name}: {label}"))
        return w.compile(w.lines)

    def _emit_tensor_check(self, w: FunctionWriter, signature: Signature, tensors: list[str], miss: str) -> None:
        check = TensorCheck(signature)
        plain, inference = w.name(torch.Tensor), w.name(torch.is_inference_mode_enabled)
        memo, learn, key, found = w.name(check.memo), w.name(check.learn), w.name(), w.name()
        all_tensors = ", ".join(tensors)
        parts = "".join(f"{size}, " for size in check.key_of(tensors))
        shape = [f"{key} = ({parts}{inference}(),)", f"{found} = {memo}.get({key})"]
        fits = f"if ({found} is None or not {found}({all_tensors})) and not {learn}({key}, {all_tensors}): {miss}"
        sized = check.sized(tensors)
        if not sized:
            w.lines += [*shape, fits]
            return
        # Sizes can be read from plain tensors of the right rank only; everything else is judged in Python.
        w.lines.append(f"if {' is '.join(f'{w.type}({t})' for t, _ in sized)} is {plain}:")
        w.lines.append(f"  if {' or '.join(f'{t}.dim() != {rank}' for t, rank in sized)}: {miss}")
        w.lines += [f"  {line}" for line in (*shape, fits)]
        w.lines += ["else:", f"  if not {learn}(None, {all_tensors}): {miss}"]

    def reset_counts(self) -> None:
        """Forget calls that were not the user's own: counts start at 0 and warnings are given again."""
        with self._lock:
            self.misses.reset()
            for entry in self.entries:
                entry.reset_counts()
            self.to_original.clear()
            self._said.clear()

    def _note_failure(self, index: int, error: Exception) -> None:
        label = self.entries[index].installed.choice.candidate.label
        text = str(error).strip().partition("\n")[0][:200]
        self._note(f"{label} failed and the original ran: {type(error).__name__}: {text}")

    def _wants_gradients(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        weights = self.watch.tensors if self.watch is not None else self._weights
        wanted = any(t.requires_grad for t in tensors) or any(p.requires_grad for p in weights)
        if wanted:
            self._note(GRADIENTS)
        return wanted

    def _holds(self, index: int) -> bool:
        """Whether an executable may still be used, after the watch found something."""
        assert self.watch is not None
        with self._lock:
            if self.watch.dirty or not self.watch.look():
                self._revalidate()
            entry = self.entries[index]
            if entry.stale:
                self._note(
                    f"{self.watch.found} after tuning: {entry.installed.choice.candidate.label} no longer holds and the "
                    "original runs; tune again, or put the weights back and call aitune_lab.refresh(target)"
                )
            return not entry.stale

    @staticmethod
    def _moved(entry: Entry) -> bool:
        moved = entry.installed.executable.moved
        return moved is not None and moved()

    def _revalidate(self, *, asked: bool = False) -> None:
        """Decide anew which executables hold. What takes long is done only if the user asked for it."""
        watch = self.watch
        assert watch is not None
        watch.dirty = False
        baked = any(entry.digest is not None for entry in self.entries)
        # Of a weight written through `.data`, samples may show nothing.
        if not (asked and baked) and watch.untouched() and not any(entry.stale for entry in self.entries):
            watch.suspect = False
            return
        same_kind = watch.same_kind()
        attributes = watch.changed_attributes()
        if same_kind and attributes:
            watch.found = f"attribute {attributes[0]!r} was changed"
        same = same_kind and not attributes
        digest = content_digest(self.module) if baked and same else ""
        for entry in self.entries:
            if entry.digest is None:
                # Graphs replayed by address hold attributes as constants; other live executables look themselves.
                fits = same if entry.installed.executable.moved is not None else same_kind
                entry.stale = not fits or (self._moved(entry) and not (asked and self._refreshed(entry)))
            elif entry.digest == digest:
                entry.stale = False
            elif same and self._refreshed(entry):
                entry.digest, entry.stale = digest, False
            else:
                entry.stale = True
        watch.accept()
        watch.suspect = watch.dirty or any(entry.stale for entry in self.entries)

    @staticmethod
    def _refreshed(entry: Entry) -> bool:
        refresh = entry.installed.executable.refresh
        return refresh is not None and refresh()

    def refresh(self) -> bool:
        """Look at all weights now. Says whether every executable holds."""
        if self.watch is None:
            return True
        with self._lock:
            self.watch.mark(self.watch.found or "weights changed")
            self._revalidate(asked=True)
            return not any(entry.stale for entry in self.entries)

    def _note(self, reason: str) -> None:
        """Count a call that ran the original; warn at the first of each reason."""
        if self.on_miss == "error":
            raise SignatureMiss(f"{self.name}: {reason}")
        with self._lock:
            if len(self.to_original) < MAX_REASONS or reason in self.to_original:
                self.to_original[reason] = self.to_original.get(reason, 0) + 1
            first = reason not in self._said and len(self._said) < MAX_REASONS
            if first:
                self._said.add(reason)
        if first:
            _warn(f"{self.name}: {reason}")

    def _missed(self, *args: Any, **kwargs: Any) -> Any:
        """A call that fits no signature."""
        if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
            return self.original(*args, **kwargs)
        number = next(self.misses.count)
        if self.on_miss == "error" or number < EXPLAINED_MISSES:
            reason = self.explain(args, kwargs)
            if self.on_miss == "error":
                otherwise = "originals='cpu'" if self.originals == "drop" else "on_miss='original'"
                raise SignatureMiss(
                    f"{self.name}: the call fits no tuned signature: {reason}. Tuned: {self.signatures()}. "
                    f"Tune with data of this kind, or with {otherwise}"
                )
            with self._lock:
                if len(self.to_original) < MAX_REASONS or reason in self.to_original:
                    self.to_original[reason] = self.to_original.get(reason, 0) + 1
                first = _MISS not in self._said
                self._said.add(_MISS)
            if first:
                _warn(
                    f"{self.name}: a call fits no tuned signature and ran the original module ({reason}); further ones are "
                    "only counted, see aitune_lab.stats(target)"
                )
        return self.original(*args, **kwargs)

    def signatures(self) -> str:
        return "; ".join(entry.installed.signature.label for entry in self.entries)

    def explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why a call fits no signature: how it differs from the nearest one."""
        try:
            flat = flatten_call(self.form.normalize(args, kwargs))
            reasons = [self._differs(entry.installed.signature, flat) for entry in self.entries]
        except TypeError as error:
            return str(error)
        except Exception as error:  # the caller's objects may not even be printed
            return f"the call can't be described: {type(error).__name__}"
        return min(reasons, key=lambda r: r[0])[1]

    def _structure_differs(self, signature: Signature, flat: Flat) -> str:
        given, tuned = set(flat.node.keys), set(signature.inputs.keys)
        for name in sorted(map(str, given - tuned)):
            value = next((x for x, path in zip(flat.leaves, flat.paths, strict=True) if path == name), None)
            shown = "given" if value is None or is_tensor(value) else value_text(value)[:80]
            parameter = self.form.signature.parameters.get(name)
            return f"{name} is {shown}" + (f", tuned for its default {parameter.default!r}" if parameter else "")
        for name in sorted(map(str, tuned - given)):
            return f"{name} is left out, tuned with it"
        if list(flat.paths) != [leaf.path for leaf in signature.leaves]:
            return f"arguments are {list(flat.paths)[:20]}, tuned for {[leaf.path for leaf in signature.leaves][:20]}"
        return "the arguments' classes differ"

    def _differs(self, signature: Signature, flat: Flat) -> tuple[int, str]:
        """(how far, in words); smaller is nearer."""
        if autocast_state() != signature.autocast:
            return 3, f"autocast is {dict(autocast_state()) or 'off'}, tuned with {dict(signature.autocast) or 'off'}"
        if flat.node != signature.inputs or len(flat.leaves) != len(signature.leaves):
            return 4, self._structure_differs(signature, flat)
        for path, value, leaf in zip(flat.paths, flat.leaves, signature.leaves, strict=True):
            if isinstance(leaf, ValueLeaf) and (is_tensor(value) or value_text(value) != leaf.text):
                shown = "a tensor" if is_tensor(value) else value_text(value)[:80]
                return 2, f"{path} is {shown}, tuned for {leaf.text}"
            if isinstance(leaf, OpaqueLeaf) != (not is_tensor(value)) and isinstance(leaf, (OpaqueLeaf, TensorLeaf)):
                if isinstance(leaf, TensorLeaf) and leaf.holder == "numpy":
                    continue
                return 2, f"{path} is a {type(value).__name__}, tuned for {leaf_label(leaf)}"
        tensors = tuple(
            torch.as_tensor(x)
            for x, leaf in zip(flat.leaves, signature.leaves, strict=True)
            if isinstance(leaf, TensorLeaf)
        )
        return 1, TensorCheck(signature).problem(
            tensors
        ) or "inputs are one tensor, share memory or are laid out otherwise than when tuned"
