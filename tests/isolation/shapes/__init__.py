"""Shapes of memory: each class in these modules is a row of one table.

A new row is a subclass of `Shape` in any of them: make in `begin` what is kept, use it in `scaled` or in a
hook, and say in `refused` what an error must name if the shape need not be isolated. The row's name is the
class's; one that begins with an underscore is a part of rows.
"""

from inspect import isclass

from tests.isolation.shapes import (
    callbacks,
    data,
    escapes,
    functions,
    layers,
    leaving,
    objects,
    optimizers,
    outside,
    values,
)
from tests.isolation.worlds import Shape


def _rows(module):
    kinds = [kind for kind in vars(module).values() if isclass(kind) and issubclass(kind, Shape)]
    return [k for k in kinds if k.__module__ == module.__name__ and not k.__name__.startswith("_")]


ROWS = [
    row
    for module in (values, objects, functions, layers, callbacks, data, optimizers, escapes, outside, leaving)
    for row in _rows(module)
]
