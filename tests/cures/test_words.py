"""The scan of errors sees what stands behind constants, variables and helpers."""

from tests.cures.words import Words


def texts(source):
    return [said for _, said in Words(source).errors()]


def test_values_are_braces_and_arguments_stand_apart():
    assert texts("raise ValueError(f'{name!r} must be > 0, got {value}')") == [["{} must be > 0, got {}"]]
    assert texts("raise OSError('no ' + 'file', 3)") == [["no file {}"]]
    assert texts("raise ValueError('two ' if pair else 'one ')") == [["two ", "one "]]
    assert not texts("raise error\nraise")


def test_a_constant():
    assert texts("CURE = 'use 2'\ndef check():\n    raise ValueError(CURE)") == [["use 2"]]


def test_a_local_variable_is_its_last_value_above():
    source = """
cure = "of the module"
def check():
    cure = "first"
    cure = "use 2"
    raise ValueError(f"no; {cure}")
    cure = "later"
"""
    assert texts(source) == [["no; {}", "no; use 2"]]
    source = (
        "def check(wrong):\n    if why := wrong and 'too few':\n        raise ValueError(f'{why}; use 2')"
    )
    assert texts(source) == [["{}; use 2"]]  # of `and`, nothing is known


def test_what_is_added_may_not_have_been():
    source = "def check():\n    words = 'few'\n    words += '; use 2'\n    raise ValueError(words)"
    assert texts(source) == [["few; use 2", "few"]]


def test_an_attribute_is_whatever_any_method_gives_it():
    source = """
class Check:
    def first(self):
        self._error = "use 2"
    def second(self):
        raise ValueError(self._error)
"""
    assert texts(source) == [["use 2"]]


def test_a_value_that_is_a_cure_is_a_choice():
    source = """
def cure(few):
    if few:
        return "use 2"
    return f"take {many}"
def check():
    raise ValueError(f"no; {cure(True)}")
"""
    assert [set(found) for found in texts(source)] == [{"no; {}", "no; use 2", "no; take {}"}]


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


def test_a_function_that_makes_the_error():
    source = """
def twice(name):
    return ValueError(f"{name} is named twice; leave one out")
def check():
    raise twice("a")
"""
    assert texts(source) == [["{} is named twice; leave one out"]]


def test_a_function_that_calls_itself_ends():
    assert texts("def why():\n    return f'{why()}'\nraise ValueError(why())") == [["{}"]]
