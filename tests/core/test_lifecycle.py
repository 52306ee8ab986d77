import re
from enum import StrEnum
from importlib.resources import files

import pytest

from rlhfd.core import lifecycle
from rlhfd.core.types import CheckpointState, GroupState, JobState, RolloutState, StepState, VersionState
from rlhfd.errors import UsageError

NOUNS = list(lifecycle.INITIAL)
TABLES = {
    JobState: "job",
    GroupState: "grp",
    RolloutState: "rollout",
    StepState: "step",
    VersionState: "policy_version",
    CheckpointState: "checkpoint",
}


@pytest.mark.parametrize("noun", NOUNS)
def test_every_state_can_be_reached(noun: type[StrEnum]):
    reached, before = {lifecycle.INITIAL[noun]}, set()
    while reached != before:
        before = set(reached)
        reached |= {new for old, _, new in lifecycle.rows(noun) if old in reached}
    assert reached == set(noun)


@pytest.mark.parametrize("noun", NOUNS)
def test_an_event_has_one_target(noun: type[StrEnum]):
    for event in {event for _, event, _ in lifecycle.rows(noun)}:
        assert len({new for _, name, new in lifecycle.rows(noun) if name == event}) == 1
        assert lifecycle.target(noun, event) in noun


@pytest.mark.parametrize("noun", NOUNS)
def test_the_schema_knows_exactly_these_states(noun: type[StrEnum]):
    schema = files("rlhfd.store").joinpath("schema.sql").read_text()
    table = re.search(rf"CREATE TABLE {TABLES[noun]} \((.*?)\) STRICT", schema, re.DOTALL)
    assert table
    check = re.search(r"\bstate TEXT NOT NULL CHECK\(state IN \((.*?)\)\)", table[1])
    assert check
    assert {state.strip("'") for state in check[1].split(",")} == set(noun)


def test_no_row_is_there_twice():
    assert len(set(lifecycle.TABLE)) == len(lifecycle.TABLE)


def test_every_legal_move_is_made_and_every_other_one_is_refused():
    for noun in NOUNS:
        legal = {(old, event): new for old, event, new in lifecycle.rows(noun)}
        for state in noun:
            for event in {event for _, event, _ in lifecycle.rows(noun)}:
                if (state, event) in legal:
                    assert lifecycle.move(state, event) is legal[state, event]
                else:
                    with pytest.raises(UsageError, match=f"a {state} "):
                        lifecycle.move(state, event)


def test_the_refusal_says_from_where_it_is_legal():
    assert (
        lifecycle.refusal(JobState.DONE, "requeue")
        == "a done job can't requeue: only a paused or failed or cancelled one can"
    )


def test_an_event_that_a_noun_does_not_have_is_a_bug():
    with pytest.raises(KeyError, match="JobState has no event 'publish'"):
        lifecycle.move(JobState.QUEUED, "publish")
    with pytest.raises(KeyError):
        lifecycle.target(JobState, "publish")


def test_terminal_states_are_those_that_are_meant_to_be():
    terminal = {state for noun in NOUNS for state in noun if not any(old is state for old, _, _ in lifecycle.TABLE)}
    assert terminal == {
        JobState.DONE,
        GroupState.DROPPED,
        RolloutState.SCORED,
        RolloutState.FAILED,
        StepState.VOID,
        VersionState.LOST,
        CheckpointState.DELETING,
    }


def test_the_diagram_has_an_arrow_for_every_row():
    drawn = lifecycle.diagram()
    for old, event, new in lifecycle.TABLE:
        assert f"    {old} --> {new}: {event}\n" in drawn
    assert drawn.count("stateDiagram-v2") == len(NOUNS)
    assert drawn.count("[*] --> ") == len(NOUNS)
