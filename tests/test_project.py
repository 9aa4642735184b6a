"""The project's own promises: clean code, README commands that are what CI runs, small and honest contents."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import aitune_lab
from aitune_lab.tuning.candidates import with_candidates
from aitune_lab.tuning.planfile import plan_from_toml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MARKED = dict(re.findall(r"<!-- command: (\w+) -->\n```bash\n(.*?)\n```", README, flags=re.DOTALL))
BIN = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
LINTS = {
    "ruff check": ["ruff", "check"],
    "ruff format": ["ruff", "format", "--check"],
    "mypy": ["mypy"],
    "import-linter": ["lint-imports", "--no-logo"],
}


def run(command: list[str], *, cwd: Path = ROOT, timeout: float = 280) -> str:
    program = shutil.which(command[0], path=BIN)
    assert program, f"{command[0]} is not installed; install the extra 'test'"
    done = subprocess.run([program, *command[1:]], cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run(["git", "ls-files", "-z"]).split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize("name", LINTS)
def test_code_is_clean(name: str) -> None:
    run(LINTS[name])


def test_readme_has_the_two_commands_and_ci_runs_the_second() -> None:
    assert list(MARKED) == ["demo", "test"]
    assert MARKED["demo"].endswith("aitune-lab demo")
    assert MARKED["test"].endswith("python -m pytest")
    assert run(["bash", ".ci/run", "--print"]).rstrip("\n") == MARKED["test"]


@pytest.mark.parametrize("name", ["demo", "test"])
def test_readme_command_sets_up_everything_it_names(name: str) -> None:
    command = MARKED[name]
    subprocess.run(["bash", "-n", "-c", command], check=True, timeout=30)
    assert command.startswith("python3 -m venv .venv")
    extras = re.search(r"'\.\[([\w,-]+)\]'", command)
    assert extras
    assert set(extras[1].split(",")) <= extra_names()
    constraints = re.search(r"-c (\S+)", command)
    assert constraints
    assert "torch==" in (ROOT / constraints[1]).read_text(encoding="utf-8")


def test_readme_names_the_extras_that_exist() -> None:
    row = next(line for line in README.splitlines() if line.startswith("| Extras |"))
    assert set(re.findall(r"`([\w-]+)`", row)) == extra_names()


def extra_names() -> set[str]:
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional-dependencies]\n")[2]
    return set(re.findall(r"^([\w-]+) = \[", section.partition("\n[")[0], flags=re.MULTILINE))


def test_readme_lists_the_commands_of_the_command_line() -> None:
    listed = set(re.findall(r"^\| `aitune-lab (\w+)", README, flags=re.MULTILINE))
    program = "import sys; sys.argv = ['aitune-lab', '--help']; from aitune_lab.cli import main; sys.exit(main())"
    usage = re.search(r"\{([\w,-]+)\}", run(["python", "-c", program]))
    assert usage
    assert listed == set(usage[1].split(","))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_readme_example_runs(tmp_path: Path) -> None:
    example = re.search(r"<!-- example -->\n```python\n(.*?)\n```", README, flags=re.DOTALL)
    assert example
    said = run(["python", "-c", example[1]], cwd=tmp_path, timeout=880)
    assert (tmp_path / "tuned.ait").exists() or "eager stays" in said


def test_the_plan_in_the_docs_is_the_same_in_toml_and_in_python() -> None:
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    as_toml, as_python = (
        re.search(rf"<!-- plan: {language} -->\n```{language}\n(.*?)\n```", text, flags=re.DOTALL)
        for language in ("toml", "python")
    )
    assert as_toml
    assert as_python
    found: dict[str, Any] = {}
    exec(as_python[1], found)
    assert with_candidates(found["plan"]) == plan_from_toml(as_toml[1])


def test_the_docs_list_every_public_name() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    assert not [name for name in aitune_lab.__all__ if name != "__version__" and not re.search(rf"`{name}\b", text)]


@pytest.mark.parametrize(
    "page", [p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), f"{page} links to {link}"


def test_no_large_file_is_kept() -> None:
    large = {path.name: path.stat().st_size for path in tracked() if path.stat().st_size > 1 << 20}
    assert not large


def test_lock_files_hold_no_registry_addresses() -> None:
    locks = [p for p in tracked() if p.suffix == ".lock" or p.name in ("package-lock.json", "pylock.toml")]
    held = {
        p.name: re.findall(r'(?:resolved|registry|url)"?\s*[:=]?\s*"?https?://[^"\s]+', p.read_text()) for p in locks
    }
    assert not any(held.values()), held


@pytest.mark.full
@pytest.mark.timeout(600)
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    run(["uv", "build", "--wheel", "--out-dir", str(tmp_path)], timeout=580)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    info = next(name.partition("/")[0] for name in names if name.endswith("/METADATA"))
    assert {name.partition("/")[0] for name in names} == {"aitune_lab", info}
    assert "aitune_lab/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    sources = {p.relative_to(ROOT).as_posix() for p in tracked() if p.is_relative_to(ROOT / "aitune_lab")}
    assert sources <= set(names)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_the_lowest_and_highest_python_pass_the_tests(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    venv = tmp_path / "venv"
    run(["uv", "venv", "-q", "-p", python, str(venv)])
    run(["uv", "pip", "install", "-q", "-p", str(venv), "-c", "constraints.txt", "-e", ".[test]"], timeout=900)
    run([str(venv / "bin" / "python"), "-m", "pytest", "-q", "--ignore=tests/test_project.py"], timeout=2600)


def interpreter(version: str) -> str | None:
    """A Python of that version that starts: on PATH (pyenv's shims there may not) or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return python
    return None
