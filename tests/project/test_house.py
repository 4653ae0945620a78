"""What a reader must follow may only become less: the calls, files, classes and depth of steps, names, and lines."""

import house
import pytest

SLACK = 6  # calls of a thread that waits now and then


def test_a_step_on_threads_is_no_longer_than_it_was():
    assert house.above(house.measured(), house.bounds("steps"), SLACK) == []


@pytest.mark.torch
def test_an_exchange_of_a_model_of_torch_is_no_longer_than_it_was():
    assert house.above(house.measured(house.WITH_TORCH), house.bounds("steps"), SLACK) == []


@pytest.mark.mpi
def test_a_step_over_mpi_is_no_longer_than_it_was():
    assert house.above(house.over_mpi(), house.bounds("over MPI"), SLACK) == []


def test_interfaces_have_no_more_names_and_packages_no_more_lines():
    assert house.above(house.names(), house.bounds("names")) + house.above(house.lines(), house.bounds("lines")) == []


def test_no_class_has_the_name_of_another_one():
    places = house.classes()
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_what_is_above_its_bound_is_told():
    most = {"dense": {"calls": 3}}
    assert house.above({"dense": {"calls": 3, "comments": 9}}, most) == []
    assert house.above({"dense": {"calls": 4}}, most) == ["dense: calls must be at most 3, got 4"]
    assert house.above({"half": {"calls": 1}}, most) == ["half: calls must be at most 0, got 1"]
