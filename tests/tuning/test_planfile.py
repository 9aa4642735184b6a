from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from aitune_lab.errors import PlanError
from aitune_lab.schema import Candidate, Limits, Plan, Rule, StrategyConfig, Tolerance
from aitune_lab.tuning.planfile import (
    check_plan,
    is_beneath,
    outermost_pins,
    plan_from_toml,
    plan_to_toml,
    read_plan,
    write_plan,
)
from aitune_lab.tuning.strategies import LatencyBudgetStrategy

TEXT = r"""
accuracy = "budget"
max_relative_error = 1e-4

[strategy]
name = "LatencyBudget"
budget_ms = 5

[limits]
max_seconds = 60
search = "quick"

[[rule]]
pattern = "re:encoder\\..*"
pin = { backend = "onnxruntime", options = { threads = 2 }, precision = "float16" }
accept_error = true

[[rule]]
pattern = "re:.*"
exclude = "inductor"

[[rule]]
pattern = "head"
leave = true

[[rule]]
pattern = "decoder"
strategy = "MaxThroughput"

[[rule]]
pattern = "pooler"
pin = "eager"
"""

PLAN = Plan(
    rules=(
        Rule(
            r"re:encoder\..*",
            "pin",
            Candidate("onnxruntime", (("threads", 2),), precision="float16"),
            accept_error=True,
        ),
        Rule("re:.*", "exclude", excluded="inductor"),
        Rule("head", "leave"),
        Rule("decoder", "strategy", strategy=StrategyConfig("MaxThroughput")),
        Rule("pooler", "pin", Candidate("eager")),
    ),
    strategy=StrategyConfig("LatencyBudget", (("budget_ms", 5),)),
    tolerance=Tolerance(max_relative_error=1e-4),
    limits=Limits(max_seconds=60.0, search="quick"),
)


def test_a_plan_as_people_write_it() -> None:
    assert plan_from_toml(TEXT) == PLAN


def test_files(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == PLAN
    with pytest.raises(PlanError, match=r"none\.toml.*can't be read"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("accuracy = 3")
    with pytest.raises(PlanError, match=r"bad\.toml: accuracy must be one of \['budget', 'exact'\], but got 3"):
        read_plan(tmp_path / "bad.toml")


def test_the_default_plan_is_empty_but_for_its_strategy() -> None:
    assert plan_to_toml(Plan()) == '[strategy]\nname = "MinLatency"\n'
    assert plan_from_toml("") == Plan()


# Control characters, quotes, backslashes and any script: everything but lone surrogates, which UTF-8 can't hold.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text("abcdefgh_.- é\"'\\", min_size=1, max_size=8)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), texts
)  # fmt: skip
options = st.dictionaries(names.filter(lambda n: n != "unset"), values, max_size=3).map(
    lambda d: tuple(sorted(d.items()))
)
candidates = st.builds(
    Candidate,
    texts,
    options,
    st.sampled_from(["as is", "float16"]),
    st.sampled_from([None, "channels_last"]),
    st.booleans(),
)
configs = st.sampled_from([StrategyConfig(), StrategyConfig("FirstWins"), LatencyBudgetStrategy(0.1).config()])
patterns = texts.filter(lambda text: not text.startswith("re:")) | st.just(r"re:layers\.\d+")
rules = st.one_of(
    st.builds(Rule, patterns, st.just("pin"), candidates, accept_error=st.booleans()),
    st.builds(Rule, patterns, st.just("strategy"), strategy=configs),
    st.builds(Rule, patterns, st.just("exclude"), excluded=texts),
    st.builds(Rule, patterns, st.just("leave")),
)
shares = st.floats(0, 1)
plans = st.builds(
    Plan,
    st.lists(rules, max_size=3).map(tuple),
    configs,
    st.builds(
        Tolerance, st.sampled_from(["budget", "exact"]), st.none() | shares, st.none() | st.floats(-9, 99), shares
    ),
    st.builds(
        Limits,
        st.floats(0),
        st.integers(0, 10**9),
        memory_bytes=st.none() | st.integers(0, 2**40),
        search=st.sampled_from(["quick", "normal", "exhaustive"]),
    ),
    st.booleans(),
)


@given(plans)
def test_any_plan_comes_back_from_its_toml(plan: Plan) -> None:
    assert plan_from_toml(plan_to_toml(plan)) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accuracy = ", "no valid TOML"),
        ("acuracy = 'exact'", r"keys of the plan must be among .* but got 'acuracy'\. Did you mean 'accuracy'"),
        ("[limits]\nmax_trials = 1.5", "limits.max_trials must be a whole number of at least 0, but got 1.5"),
        ("[pins]\nencoder = 'onnxruntime'", r"rule of its own.*\n.*\[\[rule\]\]"),
        ("[[rule]]\npattern = 'a'\npin = 3", r"label such as 'inductor\[freezing\]', or a table"),
        ("[[rule]]\npattern = 'a'\npin = 'inductor[freezng]'", "freezng"),
        ("[limits]\nmax_second = 5", "Did you mean 'max_seconds'"),
        ("max_relative_error = nan", "must be a number of at least 0, but got nan"),
        ("min_agreement = 2", "share of at most 1"),
        ("split_points = 1", "must be true or false, but got 1"),
        ("strategy = 'Fastest'", "strategy: strategy must be one of .*'Fastest'"),
        ("[strategy]\nname = 'LatencyBudget'", "strategy: strategy 'LatencyBudget' needs the option 'budget_ms'"),
        ("rule = 3", r"\[\[rule\]\]"),
        ("[[rule]]\npin = 'x'", "rule 1: pattern must be a string, but got nothing"),
        ("[[rule]]\npattern = 'a'", r"rule 1 \('a'\): exactly one of .* got none"),
        ("[[rule]]\npattern = 'a'\nleave = true\npin = 'x'", "exactly one of .* got .*'pin'.*'leave'"),
        ("[[rule]]\npattern = 'a'\nleave = false", "leave must be true"),
        ("[[rule]]\npattern = 'a'\npin = {backend = 3}", "pin.backend must be a string, but got 3"),
        ("[[rule]]\npattern = 'a'\npin = {backend = 'x', treads = 3}", "pin must be among .* but got 'treads'"),
        ("[[rule]]\npattern = 'a'\npin = {backend = 'x', options = {t = [1]}}", r"pin.t must be .* but got \[1\]"),
        ("[[rule]]\npattern = 'a'\nleave = true\naccept_error = true", "accept_error belongs to a pin"),
        ("[[rule]]\npattern = 're:('\nleave = true", "no regular expression"),
    ],
)
def test_faults_name_the_place(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_from_toml(text)


PATHS = ["", "encoder", "encoder.layer.0", "encoder.layer.1", "head", "encoder2"]
BACKENDS = ["eager", "onnxruntime", "inductor"]


def pin(pattern: str, backend: str = "onnxruntime") -> Rule:
    return Rule(pattern, "pin", Candidate(backend))


def test_a_sound_plan_has_no_warnings() -> None:
    plan = Plan(
        (pin(r"re:encoder\.layer\.\d"), Rule("re:.*", "exclude", excluded="inductor[freezing]"), pin("encoder2"))
    )
    assert check_plan(plan, PATHS, BACKENDS) == []


def test_a_pattern_without_match_is_a_warning() -> None:
    assert check_plan(Plan((pin("re:decoder.*"),)), PATHS, BACKENDS) == [
        "rule 1 ('re:decoder.*') matches no module, so it does nothing"
    ]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((pin("encodr"),)), r"rule 1 \('encodr'\): no module has this path\. Did you mean 'encoder'"),
        (Plan((pin("encoder.layer"),)), r"Did you mean 'encoder.layer.0' or 'encoder.layer.1'"),
        (Plan((Rule("zzzzzz", "leave"),)), "no module has this path"),
        (Plan((pin("head", "tensorflow"),)), r"backend must be one of \['eager', .*\], but got 'tensorflow'"),
        (Plan((Rule("re:.*", "exclude", excluded="inducto"),)), "but got 'inducto'"),
        (Plan((Rule("re:.*", "exclude", excluded="re:("),)), "no regular expression"),
        (Plan((pin("re:["),)), "no regular expression"),
        (Plan((Rule("head", "pin"),)), "must name a backend"),
        (Plan((Rule("head", "strategy"),)), "strategy must be named"),
        (
            Plan((Rule("head", "strategy", strategy=StrategyConfig("X")),)),
            r"rule 1 \('head'\): strategy must be one of",
        ),
        (Plan(strategy=StrategyConfig("OneBackend", (("backend", "ort"),))), "the plan's strategy: .* but got 'ort'"),
        (Plan((pin("encoder"), pin("encoder.layer.1"))), "'encoder' .* and 'encoder.layer.1' .* both pinned"),
        (Plan((pin(r"re:encoder\.layer.*"), pin("encoder"))), "both pinned"),
        (Plan((pin("head"), pin(""))), "'' .* and 'head'"),
    ],
)
def test_plans_that_do_not_fit_the_target(plan: Plan, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check_plan(plan, PATHS, BACKENDS)


def test_one_pattern_pins_the_outermost_module_it_matches() -> None:
    rule = pin("re:encoder.*")
    assert outermost_pins(Plan((rule,)), PATHS) == {"encoder": rule, "encoder2": rule}


def test_an_earlier_rule_lifts_a_pin() -> None:
    plan = Plan((Rule("encoder", "leave"), pin("re:encoder"), pin("encoder.layer.0")))
    assert set(outermost_pins(plan, PATHS)) == {"encoder.layer.0"}


@pytest.mark.parametrize(
    ("path", "other", "beneath"),
    [("a.b", "a", True), ("a[0]", "a", True), ("ab", "a", False), ("a", "a", False), ("a", "", True), ("", "", False)],
)
def test_beneath(path: str, other: str, beneath: bool) -> None:
    assert is_beneath(path, other) is beneath


def test_options_may_be_none() -> None:
    plan = Plan((Rule("head", "pin", Candidate("x", (("a", None), ("b", 1)))),))
    text = plan_to_toml(plan)
    assert 'unset = [\n    "a",\n]' in text or 'unset = ["a"]' in text
    assert plan_from_toml(text) == plan


def test_a_plan_is_a_plan_or_a_path() -> None:
    with pytest.raises(PlanError, match="must be a Plan or the path of its TOML file, but got 5"):
        read_plan(5)  # type: ignore[arg-type]
