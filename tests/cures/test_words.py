"""What the rows of the package do not show: where the errors of a helper are."""

from tests.cures.words import Words


def test_a_helper_s_errors_are_where_it_is_called():
    source = """
def refuse(condition, what, *, cure):
    raise ValueError(f"needs {condition}: {what}; {cure}, or leave it")
class Checks:
    def both(self):
        what = "first is missing"
        refuse("A", what, cure="give it")
        what = f"{self.second} is odd"
        refuse("B", what, cure="make it even")
    def refuse_by_itself(self, cure):
        raise ValueError(f"no; {cure}")
    def third(self):
        self.refuse_by_itself("ask me")
"""
    assert [*Words(source).errors()] == [
        (7, ["needs A: first is missing; give it, or leave it"]),
        (9, ["needs B: {} is odd; make it even, or leave it"]),
        (13, ["no; ask me"]),
    ]


def test_a_helper_that_is_given_values_alone_is_one_error():
    source = "def check(n):\n    raise ValueError(f'n = {n}')\ncheck(3)\ncheck('three')"
    assert [*Words(source).errors()] == [(2, ["n = {}"])]
