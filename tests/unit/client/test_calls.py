"""Requests of the client library from plain arguments."""

from __future__ import annotations

import pytest
from fissile.client.calls import generate_request
from fissile.v1 import inference_pb2 as pb


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"choices": ["yes", "no"]}, pb.Constraint(choices=pb.Choices(texts=["yes", "no"]))),
        ({"choices": {"texts": ["yes"]}}, pb.Constraint(choices=pb.Choices(texts=["yes"]))),
        ({"json_schema": {"b": "é", "a": 1}}, pb.Constraint(json_schema='{"b": "é", "a": 1}')),
        ({"json_schema": "{}"}, pb.Constraint(json_schema="{}")),
        (pb.Constraint(json_object=True), pb.Constraint(json_object=True)),
    ],
)
def test_a_constraint_is_given_as_it_is_written(given: object, expected: pb.Constraint) -> None:
    assert generate_request("p", {"constraint": given}, {}).sampling_params.constraint == expected
    assert not generate_request("p", {}, {}).sampling_params.HasField("constraint")


def test_another_constraint_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="constraint="):
        generate_request("p", {"constraint": {"other": 1}}, {})
