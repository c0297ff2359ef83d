"""docs/plan-schema.json describes what `plan --json` prints: checked with jsonschema."""

from __future__ import annotations

import json
from pathlib import Path

import plans
import pytest

from bnb_dispatch_fix.planning.records import RUNS, SCHEMA

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema checks the schema of plans")

PATH = Path(__file__).parents[2] / "docs" / "plan-schema.json"


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(PATH.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def told(plan):
    return json.loads(json.dumps(plan.as_dict()))


PLANS = {
    "fits": plans.plan(),
    "no": plans.plan_that_does_not_fit(),
    "compares": plans.plan_that_compares(),
    "recipes": plans.plan_with_recipes(),
    "fewer": plans.plan_on_fewer(),
    "even": plans.plan_with_even(),
    "room": plans.plan(room=plans.room()),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plans_are_what_it_says(validator, plan):
    validator.validate(told(plan))


def test_it_describes_every_key(validator):
    document = told(plans.plan_that_compares(room=plans.room()))
    schema = validator.schema
    assert set(document) == set(schema["required"]) == set(schema["properties"])
    for name, example in (
        ("run", document["runs"][0]),
        ("load", document["runs"][0]["devices"][0]),
        ("part", document["largest"][0]),
        ("room", document["room"]),
        ("precision", document["precisions"][0]),
        ("change", told(PLANS["recipes"])["recipes"][0]),
        ("fewer", told(PLANS["fewer"])["fewer"]),
    ):
        described = schema["$defs"][name]
        assert set(example) == set(described["required"]) == set(described["properties"]), name
    assert schema["properties"]["schema"]["const"] == SCHEMA == document["schema"]
    assert schema["$defs"]["run"]["properties"]["name"]["enum"] == list(RUNS)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"strategy": "autoo"},
        {"total": -1},
        {"total": 1.5},
        {"device_map": {"lm_head": None}},
        {"runs": [{}]},
        {"notes": "none"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_refuses_what_is_none(validator, change):
    assert not validator.is_valid({**told(plans.plan()), **change})
