"""What the errors of a module say, read from its source: through constants, variables and helpers that raise.

Texts have {} where a value goes. A value that is itself a text (a constant, a variable's last value, what a
function of the module returns) is a choice: {} or that text. An error then has several texts, and the scan
asks that a row fit one of them. A function that puts a sentence it was given into its error is a helper: the
places that call it are the errors. Nothing is followed to another module.
"""

import ast
import itertools

_MOST = 64
"""Texts of one error at the most: each choice in it doubles them."""
_DEEP = 12
"""Steps from a value to its text at the most: a function may call itself."""
_UNKNOWN = ["{}"]
_REFUSES = "refused_in_private"
"""What stands below this context manager of another module is refused in the words that it is given."""


def _name(function):
    return getattr(function, "id", getattr(function, "attr", ""))


def _joined(parts):
    return ["".join(texts) for texts in itertools.islice(itertools.product(*parts), _MOST)]


def _arguments(call):
    return [*enumerate(call.args), *((keyword.arg, keyword.value) for keyword in call.keywords)]


class Words:
    """Errors of one module."""

    def __init__(self, source):
        self._raises, self._functions, self._calls, self._assigned = [], {}, {}, {}
        self._home = {}  # of a node, the innermost function that it stands in
        self._walk(ast.parse(source), None)

    def _walk(self, node, home):
        self._home[node] = home
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            self._raises.append(node)
        elif isinstance(node, ast.withitem) and _name(getattr(node.context_expr, "func", 0)) == _REFUSES:
            self._raises.append(ast.Raise(node.context_expr, lineno=node.context_expr.lineno))
            self._home[self._raises[-1]] = home
        elif isinstance(node, ast.Call):
            self._calls.setdefault(_name(node.func), []).append(node)
        elif isinstance(node, ast.FunctionDef):
            self._functions[node.name] = home = node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                where = home if isinstance(target, ast.Name) else None  # of self, it is for all methods
                self._assigned.setdefault((where, ast.unparse(target)), []).append(node.value)
        elif isinstance(node, ast.AugAssign) and (before := self._assigned.get((home, _name(node.target)))):
            more = ast.IfExp(ast.Constant(True), node.value, ast.Constant(""))  # it may stand under an if
            before.append(ast.BinOp(before[-1], ast.Add(), more, lineno=node.lineno))
        for child in ast.iter_child_nodes(node):
            self._walk(child, home)

    def errors(self):
        """Line of each error, and its texts; those of a helper at the lines where it is called."""
        for node in self._raises:
            for line, given in self._sentences_given(node) or [(node.lineno, {})]:
                yield line, [*dict.fromkeys(self._said(node.exc, given, 0))]

    def _sentences_given(self, error):
        """For each call of the function around an error: its line, and sentences that end in the error."""
        helper = self._home[error]
        if helper is None:
            return []
        names = [argument.arg for argument in (*helper.args.posonlyargs, *helper.args.args)]
        names = names[names[:1] in (["self"], ["cls"]) :]
        used = {node.id for node in ast.walk(error.exc) if isinstance(node, ast.Name)}
        found = []
        for call in self._calls.get(helper.name, ()):
            given = {names[k] if k in range(len(names)) else k: self.of(v) for k, v in _arguments(call)}
            texts = {name: given[name] for name in used & given.keys() if given[name] != _UNKNOWN}
            found.append((call.lineno, texts))
        spoken = any(" " in text for _, texts in found for choices in texts.values() for text in choices)
        return found if spoken else []

    def _said(self, call, given, depth):
        """Texts of an exception that is made by its class, or by a function of the module."""
        if _name(call.func) in self._functions:
            return self.of(call, given, depth)
        spaced = [part for argument in call.args for part in ([" "], self.of(argument, given, depth))]
        return _joined(spaced[1:])

    def of(self, node, given=None, depth=0):
        """Texts that an expression can be; `given` are those of arguments of the function around it."""
        given, depth = given or {}, depth + 1
        if depth > _DEEP:
            return _UNKNOWN
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            return _joined([self.of(part, given, depth) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            texts = self.of(node.value, given, depth)
            return texts if _name(node.value) in given else [*dict.fromkeys(_UNKNOWN + texts)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined([self.of(node.left, given, depth), self.of(node.right, given, depth)])
        if isinstance(node, ast.IfExp):
            return self.of(node.body, given, depth) + self.of(node.orelse, given, depth)
        if isinstance(node, ast.Name | ast.Attribute):
            return given.get(_name(node)) or self._assigned_to(node, given, depth)
        if isinstance(node, ast.Call) and _name(node.func) in self._functions:
            inside = ast.walk(self._functions[_name(node.func)])
            values = [found.value for found in inside if isinstance(found, ast.Return) and found.value]
            return [text for value in values for text in self._returned(value, depth)] or _UNKNOWN
        return _UNKNOWN

    def _returned(self, value, depth):
        made = isinstance(value, ast.Call) and _name(value.func).endswith("Error")
        return self._said(value, {}, depth) if made else self.of(value, {}, depth)

    def _assigned_to(self, node, given, depth):
        """Texts of a variable's last value above this line, else of the module's; of self's, all."""
        name, home = ast.unparse(node), self._home[node]
        own = [value for value in self._assigned.get((home, name), ()) if value.lineno <= node.lineno]
        of_module = self._assigned.get((None, name), [])
        values = own[-1:] or (of_module if "." in name else of_module[-1:])
        return [text for value in values for text in self.of(value, given, depth)] or _UNKNOWN
