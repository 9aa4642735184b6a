"""What every backend must hold, as tests that its author subclasses.

    class TestMine(BackendContract):
        backend = MyBackend()

Pytest then runs it on small modules, each of them a reason for which real ones went wrong. A module that the backend cannot
run must be refused with a sentence; those named in `refuses` are expected to be.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn

from ..backends.base import Availability, Backend, BackendConfig, BuildJob, Executable
from ..capture.calls import CallForm
from ..capture.recorder import Recording
from ..capture.signature import RecordedSignature, resized
from ..capture.swap import original_method
from ..errors import Refused
from ..measure.blocks import MeasureLimits
from ..measure.numerics import Call, compare
from ..runtime.dispatch import MethodDispatch
from ..runtime.installed import InstalledExecutable
from ..schema import Choice, Point, Tolerance
from ..tuning.bench import Bench, LostAlias
from .contract_cases import CASES
from .scripted import record_calls
from .surroundings import changed_keys, equal, surroundings

THREADS = 8
CALLS_BY_THREAD = 4


@dataclass
class Built:
    """One case, built: what the tests of a class share."""

    module: nn.Module
    recording: Recording
    recorded: RecordedSignature
    job: BuildJob
    executable: Executable | None
    refusal: str = ""


class BackendContract:
    """Subclass it, set `backend`, and pytest runs what every backend must hold.

    Attributes:
        backend: the instance to test; cheap to make, as it holds its config only.
        relative_error: relative L2 error that its outputs may have (as `Tolerance.max_relative_error`).
        refuses: names of `CASES` that it refuses by its nature; it fails the contract to refuse another one of the first
            five, or to build one of these.
    """

    backend: ClassVar[Backend]
    relative_error: ClassVar[float] = 1e-4
    refuses: ClassVar[frozenset[str]] = frozenset()
    _built: ClassVar[dict[str, Built]]
    _folder: ClassVar[Path]

    @classmethod
    def setup_class(cls) -> None:
        """Called by pytest before the first test of a class."""
        cls._built, cls._folder = {}, Path(tempfile.mkdtemp(prefix="aitune-lab-contract-"))

    @classmethod
    def teardown_class(cls) -> None:
        """Called by pytest after the last test of a class: every executable is closed, once."""
        for built in cls._built.values():
            if built.executable is not None:
                built.executable.close()
        shutil.rmtree(cls._folder)

    # --- what it says of itself -----------------------------------------------------------------------------------

    def test_availability_is_said_and_never_raised(self) -> None:
        """Also where none of its packages can be found; an absence has a reason and a cure."""
        here = self.backend.available()
        assert isinstance(here, Availability)
        assert here.ok, f"the contract needs a backend that can run here: {here.reason}"
        with mock.patch("importlib.util.find_spec", return_value=None):
            absent = self.backend.available()
        assert absent.ok or absent.reason

    def test_a_candidate_stands_for_its_backend(self) -> None:
        """Config and candidate are one in two forms; options that it doesn't have are an error."""
        cls = type(self.backend)
        assert isinstance(self.backend.config, BackendConfig)
        assert cls.of(self.backend.candidate()).config == self.backend.config
        assert self.backend.typical_error() >= 0
        for candidate in self.backend.candidates(self._case("layers").job.signature, self._case("layers").module):
            assert candidate.backend == cls.name
            assert cls.of(candidate).candidate().options == candidate.options

    # --- building -------------------------------------------------------------------------------------------------

    def test_building_changes_nothing_but_the_folder(self) -> None:
        """The module, torch's settings, random states, environment and working folder are as before; see `_case`."""
        assert self._case("layers").executable is not None

    def test_layers(self) -> None:
        """Linear layers with a batch that varies, of size 1 too."""
        self._check("layers")

    def test_convolution(self) -> None:
        """Convolution, normalisation in eval mode, pooling."""
        self._check("convolution")

    def test_attention(self) -> None:
        """Integer inputs with two dimensions that vary."""
        self._check("attention")

    def test_keywords(self) -> None:
        """Arguments that are no tensors, by keyword."""
        self._check("keywords")

    def test_structures(self) -> None:
        """Outputs in a dataclass with a dict, and strings among them."""
        self._check("structures")

    def test_an_input_that_is_written(self) -> None:
        """The new value reaches the caller's tensor, or the module is refused."""
        self._check("writes_input")

    def test_an_input_that_is_returned(self) -> None:
        """Outputs that are an input, or share its memory, do so still, or the module is refused."""
        self._check("returns_input")

    def test_state_that_calls_change(self) -> None:
        """Every call counts, or the module is refused."""
        self._check("counts_calls")

    def test_random_numbers(self) -> None:
        """The same ones as in eager for the same state, or the module is refused."""
        self._check("random")

    def test_training_mode_is_kept_or_refused(self) -> None:
        """A module left in training mode by mistake drops out at random."""
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).train()
        _, (recorded, *_) = record_calls(module, torch.randn(2, 32))
        assert recorded.signature.facts.random
        try:
            self.backend.build(self._job(module, recorded, "training")).close()
        except Refused as refusal:
            said = str(refusal)
        else:
            said = "it was built"
        assert said, "a refusal needs a sentence"

    # --- calling --------------------------------------------------------------------------------------------------

    def test_sizes_that_were_not_recorded(self) -> None:
        """Every size between the smallest and the largest recorded one."""
        built = self._case("layers")
        sample = built.job.samples[0]
        (symbol,) = built.job.signature.symbols
        points = [Point(((symbol.name, size),)) for size in range(symbol.min, symbol.max + 1)]
        self._compare(built, [resized(sample, built.job.signature, point) for point in points])

    def test_outputs_are_the_callers(self) -> None:
        """A result stays as it is when the executable is called again, and may be written."""
        built = self._case("layers")
        call, inputs = self._call(built), [torch.randn(2, 32) for _ in range(3)]
        with torch.no_grad():
            first = call(inputs[0])
            kept = first.clone()
            call(inputs[1])
            assert torch.equal(first, kept), "a later call changed an earlier result"
            first.zero_()
            assert torch.equal(call(inputs[0]), kept), "writing a result changed a later one"

    def test_inputs_stay_and_may_have_any_strides(self) -> None:
        """Views and transposed inputs give what contiguous ones do."""
        built = self._case("layers")
        call, base = self._call(built), torch.randn(32, 3)
        with torch.no_grad():
            got, want = call(base.t()), call(base.t().contiguous())
            x = torch.randn(2, 32)
            kept = x.clone()
            call(x)
        torch.testing.assert_close(got, want)
        assert torch.equal(x, kept), "the input was changed"

    def test_threads(self) -> None:
        """Eight threads at once get what each of them would get alone."""
        built = self._case("layers")
        call, start = self._call(built), threading.Barrier(THREADS)
        torch.manual_seed(0)
        inputs = [torch.randn(1 + i % 5, 32) for i in range(THREADS)]
        with torch.no_grad():
            alone = [call(x).clone() for x in inputs]
        problems: list[str] = []

        def work(i: int) -> None:
            start.wait()
            try:
                with torch.no_grad():
                    for _ in range(CALLS_BY_THREAD):
                        torch.testing.assert_close(call(inputs[i]), alone[i], rtol=1e-4, atol=1e-6)
            except Exception as error:
                problems.append(f"thread {i}: {type(error).__name__}: {error}")

        workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not problems, problems[0]

    # --- weights --------------------------------------------------------------------------------------------------

    def test_weights_that_change(self) -> None:
        """As `live_weights` and `refresh` say: new values are seen at once, or after `refresh`.

        Executables that baked them are not called any more once weights have changed, so what they give then is free.
        """
        built = self._case("layers")
        executable, call = built.executable, self._call(built)
        assert executable is not None
        x, kept = torch.randn(2, 32), copy.deepcopy(built.module.state_dict())
        with torch.no_grad():
            assert self._near(call(x), built.module(x))
            try:
                for parameter in built.module.parameters():
                    parameter.mul_(0.5)
                new = built.module(x)
                if executable.live_weights:
                    assert self._near(call(x), new), "it says that it reads the live weights, and does not"
                if executable.refresh is not None and executable.refresh():
                    assert self._near(call(x), new), "after refresh it still gives the old weights' results"
            finally:
                built.module.load_state_dict(kept)
                if executable.refresh is not None:
                    executable.refresh()
            assert self._near(call(x), built.module(x))

    # --- loading --------------------------------------------------------------------------------------------------

    def test_its_files_alone_give_the_same(self) -> None:
        """Loaded from a copy of the folder, for another module of equal weights, without samples."""
        built = self._case("layers")
        assert built.executable is not None
        if built.executable.recompiles:
            return  # its files are not used: the configuration is built again, which the other tests show to be right
        folder = self._folder / "moved"
        shutil.copytree(built.job.folder, folder)
        module = copy.deepcopy(built.module)
        job = replace(built.job, module=module, original=original_method(module, "forward"), folder=folder, samples=())
        loaded = self.backend.load(job)
        try:
            again = replace(built, module=module, job=job, executable=loaded)
            x = torch.randn(3, 32)
            with torch.no_grad():
                torch.testing.assert_close(self._call(again)(x), self._call(built)(x))
        finally:
            loaded.close()

    def test_closing_one_leaves_the_others(self) -> None:
        """Executables own what they hold: two of the same job don't share it."""
        built = self._case("layers")
        assert built.executable is not None
        if built.executable.recompiles:
            other = self.backend.build(self._job(built.module, built.recorded, "second"))
        else:
            other = self.backend.load(built.job)
        other.close()
        with torch.no_grad():
            assert self._near(self._call(built)(torch.ones(2, 32)), built.module(torch.ones(2, 32)))

    # --- how ------------------------------------------------------------------------------------------------------

    def _job(self, module: nn.Module, recorded: RecordedSignature, name: str) -> BuildJob:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        original = original_method(module, "forward")
        return BuildJob(
            "",
            module,
            original,
            CallForm(original),
            recorded.signature,
            recorded.all_samples(),
            self.backend.candidate(),
            folder,
            torch.get_num_threads(),
        )

    def _case(self, name: str) -> Built:
        """A case, built once for the class. Fails if building changes anything beside the folder."""
        if name in self._built:
            return self._built[name]
        make_module, make_items = CASES[name]
        torch.manual_seed(0)
        module = make_module().eval()
        recorder, (recorded, *more) = record_calls(module, *make_items())
        assert not more
        job = self._job(module, recorded, name)
        executable, refusal = None, ""
        before, filters = surroundings(module), warnings.filters[:]
        try:
            executable = self.backend.build(job)
        except Refused as refused:
            refusal = str(refused)
            assert refusal, "a refusal needs a sentence"
        for what, value in surroundings(module).items():
            assert equal(before[what], value), f"building {name} changed {what}{changed_keys(before[what], value)}"
        # Packages that a build imports may add filters of their own.
        assert all(f in warnings.filters for f in filters), f"building {name} dropped warning filters"
        built = Built(module, recorder.recordings[0], recorded, job, executable, refusal)
        self._built[name] = built
        return built

    def _check(self, name: str) -> None:
        """The case is right on all recorded calls, or refused where that is allowed."""
        built = self._case(name)
        expected = name in self.refuses
        if built.executable is None:
            habits = ("writes_input", "returns_input", "counts_calls", "random")
            assert expected or name in habits, f"{name} was refused: {built.refusal}"
            return
        assert not expected, f"{name} is among `refuses`, but was built"
        self._compare(built, built.job.samples)

    def _compare(self, built: Built, samples: Any) -> None:
        bench = Bench(
            built.recording,
            built.recorded,
            Tolerance(max_relative_error=self.relative_error),
            {},
            self._folder,
            torch.get_num_threads(),
            MeasureLimits(),
        )
        call = self._dispatched(built)
        calls = []
        original = original_method(built.module, "forward")
        for sample in samples:
            try:
                calls.append(Call(bench.run(original, sample), bench.run(call, sample)))
            except LostAlias as lost:
                raise AssertionError(f"{lost}; refuse such a module") from lost
        found = compare(calls, bench.tolerance, torch.float32)
        assert found.error_class != "refused", found.problem

    def _call(self, built: Built) -> Callable[..., Any]:
        assert built.executable is not None, built.refusal
        return self._dispatched(built)

    def _dispatched(self, built: Built) -> Callable[..., Any]:
        """The executable as tuned calls reach it: arguments in, the module's own structure out."""
        assert built.executable is not None
        choice = Choice("", "forward", built.job.signature.key, built.job.candidate, None, "")
        installed = InstalledExecutable(choice, built.job.signature, None, built.executable, built.job)
        return MethodDispatch(built.module, "forward", "", [installed], on_miss="error", weights="frozen").call

    def _near(self, got: torch.Tensor, want: torch.Tensor) -> bool:
        return bool((got - want).norm() <= self.relative_error * want.norm())
