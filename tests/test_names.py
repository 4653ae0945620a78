"""Names that there are not, and the closest."""

import pytest

from distopt.names import nearest, one_of, unknown


def test_the_closest():
    assert nearest("densee", ["sparse", "dense"]) == "; did you mean dense?"
    assert nearest("topk", ["top", "topk2", "dense"], 2) == "; did you mean topk2 or top?"
    assert nearest("x", ["dense"]) == nearest("x", []) == ""
    assert nearest(5, ["5"]) == "; did you mean 5?"
    assert nearest("nvlinc", ["NVLink"]) == "; did you mean NVLink?"


def test_one_of_some():
    assert one_of("verb", "sum", iter(["sum", "max"])) == "sum"
    with pytest.raises(ValueError, match=r"^verb must be one of sum, max, got 'sun'; did you mean sum\?$"):
        one_of("verb", "sun", ["sum", "max"])
    assert unknown("mode", "a", ["c", "b"]) == "there is no mode 'a': there are b, c"
    assert unknown("mode", "a", []) == "there is no mode 'a': there are none"
