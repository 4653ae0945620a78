"""Unknown names: the error suggests the closest known one."""

import pytest

from distopt.checks import check_one_of, suggest, unknown_name


def test_suggest_offers_the_closest_known_name():
    assert suggest("densee", ["sparse", "dense"]) == "; did you mean dense?"
    assert suggest("topk", ["top", "topk2", "dense"], 2) == "; did you mean topk2 or top?"
    assert suggest("x", ["dense"]) == suggest("x", []) == ""
    assert suggest(5, ["5"]) == "; did you mean 5?"
    assert suggest("nvlinc", ["NVLink"]) == "; did you mean NVLink?"


def test_check_one_of_lists_the_choices_and_suggests_the_closest():
    assert check_one_of("verb", "sum", iter(["sum", "max"])) == "sum"
    with pytest.raises(ValueError, match=r"^verb must be one of sum, max, got 'sun'; did you mean sum\?$"):
        check_one_of("verb", "sun", ["sum", "max"])
    assert unknown_name("mode", "a", ["c", "b"]) == "there is no mode 'a': there are b, c"
    assert unknown_name("mode", "a", []) == "there is no mode 'a': there are none"
