"""Privacy document of a run: the content of a `PrivacyReport`, in the order and the words of every output.

Terminal, Markdown and HTML print the `document`, and `report_file` writes the report as JSON. Each part
has a depth. A short output prints the first parts, down to a smaller depth, with the same words as the whole
document. `report_rows` orders and groups the rows.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy import definitions
from lightning_fedq.privacy.assumptions import Kind, kinds_of
from lightning_fedq.privacy.report import STATED, PrivacyReport, State
from lightning_fedq.privacy.report_rows import ORDER, ReportRow, describe_target, needs_masks, report_rows
from lightning_fedq.privacy.row import Row, adversary_title, format_times
from lightning_fedq.privacy.verdict import COLOURS, NO_GUARANTEE, NOT_RUN, VACUOUS, format_epsilon, scale

AT_THE_END, PAGE, WHOLE = 0, 1, 2
"""Depths of a terminal at the end of a fit, of `privacy.md`, and of `report.md` and `fedq privacy`."""


class _Tense(NamedTuple):
    """Words that depend on the state of a run."""

    title: str
    rounds: str
    is_: str
    holds: str
    runs: str
    sees: str
    run: str


_TENSE: dict[State, _Tense] = {
    "planned": _Tense(
        *("What this run will protect, and from whom", "to come"),
        *("will be", "will hold", "runs", "will see", "will run"),
    ),
    "running": _Tense(
        *("What this run has protected so far, and from whom", "charged so far"),
        *("is", "holds", "runs", "sees", "run"),
    ),
    "ended": _Tense(*("What was protected, and from whom", "charged"), *("was", "held", "ran", "saw", "ran")),
}
_MACHINES = (
    "The rows say what each party sees in a federation of separate machines with these settings. An "
    "outsider's row is about what this run releases."
)
NOT_COVERED = (
    "People whose data several clients hold, and what the same people pay in trainings with other ledgers.",
    "Choices made on validation data (a server learning rate, a checkpoint).",
)
"""What no run covers, in addition to the outputs that it names."""
_COMPARED = {
    Neighbours.SUBSTITUTION.value: "the client's update, any other",
    Neighbours.ZERO_OUT.value: "the client's update, zero",
}
_LEGEND = (
    "Compared: the two inputs that the adversary tries to distinguish, all else being equal. Unit: what the "
    "mechanism protects one by one. Pure: at delta 0, infinite (∞) where no bound holds for every outcome, "
    "as with Gaussian noise. Infinite mass: the probability, over the run, of an outcome that only one of "
    "the two inputs can produce, which proves which input it was. Above delta there is no guarantee at "
    "all. -: nothing is claimed."
)


class Items(NamedTuple):
    """A list with one entry per line."""

    lines: tuple[str, ...]


class Table(NamedTuple):
    """A table with heads and rows.

    A row of one cell is the heading of a group. A row that begins with `MARK` is marked.

    Args:
        heads: Heads of the columns.
        rows: Cells of each row.
        colours: Colour class by text of a cell: "good", "fair" or "bad".
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    colours: Mapping[str, str] = types.MappingProxyType({})
    """Colour class by text of a cell: "good", "fair" or "bad"."""


MARK = "▸ "
"""Mark before the row of the target."""


class Part(NamedTuple):
    """A section of the document.

    Args:
        title: Title of the section.
        blocks: Content of the section.
        depth: Smallest depth of an output that has the section.
    """

    title: str
    blocks: tuple[str | Items | Table, ...]
    depth: int


# ---- sentences ----------------------------------------------------------------------------------------


def headline(report: PrivacyReport) -> str:
    """Return what the run guarantees: epsilon, delta, adversary, and whether the target is met.

    Without a useful guarantee for clients, it begins with that for the rows of `DPSGD`, if there is one.
    """
    clients, samples = _client_headline(report), report.samples
    if samples is None or not samples.is_useful:
        return clients
    row = report.about
    if report.asked is None and (not report.secure_keys or row.verdict in (NO_GUARANTEE, VACUOUS)):
        why = "keys come from a seed" if not report.secure_keys else row.reason
        return f"{samples.promise}. No client as a whole is covered: {why}."
    return f"{clients} {samples.promise}."


def _client_headline(report: PrivacyReport) -> str:
    """Return the guarantee for whole clients."""
    if not report.secure_keys:
        return (
            "NOTHING IS PRIVATE: the keys come from a seed. The rows say what secret keys (seed: null) "
            "would give."
        )
    asked, row = report.asked, report.about
    epsilon = format_epsilon(row.epsilon)
    if asked is None:
        at = f"at delta {report.delta:g} over {report.rounds:,} rounds"
        if row.verdict == NO_GUARANTEE:
            return f"Nothing is promised to any client: {row.reason}."
        if row.verdict == VACUOUS:
            return (
                f"Nothing useful is promised {at}: the smallest epsilon is {epsilon}, against "
                f"{adversary_phrase(row)}."
            )
        smallest = f"No target. The smallest epsilon {at} is {epsilon} ({row.verdict}), "
        smallest += f"against {adversary_phrase(row)}."
        return smallest + _if_ended(report)
    over = " in every round" if asked.over == "round" else ""
    wanted = f"epsilon {asked.epsilon:g} at delta {report.delta:g}{over}"
    first = f"Asked for {wanted}, against {adversary_phrase(row)}: {describe_target(report)}"
    if not asked.met and needs_masks(row) and not report.masked:
        return f"{first}: masks {'were' if report.state == 'ended' else 'are'} {_masks(report)}."
    spent = f"{format_epsilon(asked.spent)} {'planned' if report.state == 'planned' else 'spent'}"
    if asked.over == "run":  # the run may have ended before all rounds that were asked for
        spent += " over a round" if report.rounds == 1 else f" over {report.rounds:,} rounds"
    word = row.verdict if asked.over == "run" else f"{row.verdict} over the run"
    odds = f" {row.sentence}" if asked.met and asked.over == "run" else ""
    return f"{first}, {spent} ({word}).{odds}{_if_ended(report)}"


def _if_ended(report: PrivacyReport) -> str:
    """Return what still holds for a run that ended early. See privacy filters (Whitehouse et al. 2023)."""
    if not report.ended:
        return ""
    asked, limit = report.asked, "the epsilon of all rounds that were asked for"
    if asked is not None and asked.met and asked.over == "run":
        limit = f"the target of epsilon {asked.epsilon:g}"
    elif report.limit:
        limit = f"the budget of {report.limit}"
    return (
        f" The run was ended {report.ended}. Its epsilon is for a number of rounds that was fixed "
        f"beforehand. If released outputs decided when to end, {limit} holds instead."
    )


def adversary_phrase(row: Row) -> str:
    """Return the adversary of a row as it is named in a sentence."""
    secret = " who never learns who took part" if row.cohorts == "secret" else ""
    return f"{Adversary[row.adversary].value}{secret}"


def _masks(report: PrivacyReport) -> str:
    tense = _TENSE[report.state]
    return {
        "ran": f"{tense.run}, {report.server}",
        "asked": f"asked for, and {tense.run}, {report.server}",
        "counted": f"only counted, so whoever {tense.runs} this {tense.sees} every message",
        "assumed": "only assumed, without a protocol",
        "none": f"not there, so the server {tense.sees} every message",
    }[report.masks]


def caveat(report: PrivacyReport) -> str:
    """Return sentences on the limits of a simulation. "" for real clients."""
    if not report.simulated:
        return ""
    tense = _TENSE[report.state]
    return (
        f"This {tense.is_} a simulation: one program {tense.holds} all data, exact updates and keys, so "
        f"whoever {tense.runs} it {tense.sees} everything, with or without masks. {_MACHINES}"
    )


# ---- parts --------------------------------------------------------------------------------------------


def document(report: PrivacyReport, depth: int = WHOLE) -> tuple[str, list[Part]]:
    """Return title and parts of the document, down to a depth."""
    parts = [part for part in _parts(report) if part.depth <= depth and part.blocks]
    return _TENSE[report.state].title, parts


def _parts(report: PrivacyReport) -> Iterator[Part]:
    """Yield all parts of the document, in their order."""
    report_lines = report_rows(report)
    yield Part("", tuple(text for text in (headline(report), caveat(report)) if text), AT_THE_END)
    yield Part("Who learns how much", (_adversary_table(report, report_lines),), AT_THE_END)
    yield from _page_parts(report, report_lines)
    yield Part("Figures to check", (_open_assumptions(report_lines), _LEGEND), WHOLE)
    reasons = tuple(f"{line.row.title}, {line.group}: {line.row.sentence}" for line in report_lines)
    yield Part("What each row means", (Items(reasons),), WHOLE)
    in_all = set.intersection(*(set(line.row.assumptions) for line in report_lines))
    own = _merge_equal_texts(
        (line.row.title, "; ".join(text for text in line.row.assumptions if text not in in_all))
        for line in report_lines
    )
    in_full = Items((f"every row: {'; '.join(sorted(in_all)) or 'nothing'}", *own))
    yield Part("What has to hold, in full", (in_full,), WHOLE)
    yield Part("Who sees what", (Items(tuple(f"{who.title}: {who.sees}" for who in ORDER)),), WHOLE)
    yield Part("How to read the numbers", (Items(report.notes),), WHOLE)
    advice = _merge_equal_texts((line.row.title, line.row.advice) for line in report_lines)
    if advice:
        yield Part("What would make it better", (Items(advice),), WHOLE)
    if report.charged:
        of_all = f"Epsilon of one client over the run, between any two updates, at delta {report.delta:g}."
        secret = "" if report.secure_keys else " With the secret keys that this run did not have."
        yield Part("Who was charged how often", (_charged(report), of_all + secret), WHOLE)
    if (samples := report.samples) is not None:
        yield Part("DP-SGD in the clients", (sample_table(samples), samples.about), WHOLE)


def _page_parts(report: PrivacyReport, report_lines: Sequence[ReportRow]) -> Iterator[Part]:
    """Yield what a reader needs who has `privacy.md` only."""
    samples = report.samples
    condition = next(line.when for line in report_lines if line.row.name == report.about.name)
    yield Part("The guarantee", (Items(tuple(_guarantee(report, condition))),), PAGE)
    over = "One client over the run, any update against any other. "
    hold = (_assumption_list(report_lines, samples), f"{over}{scale().capitalize()}.")
    yield Part("What has to hold", hold, PAGE)
    if samples is not None:
        line = f"{samples.line[:1].upper()}{samples.line[1:]}."
        yield Part("One sample of a client's data", (line,), PAGE)
    yield Part("What is not covered", (Items((*report.leaves, *NOT_COVERED)),), PAGE)
    yield Part("Times", (report.times,) if report.times else (), PAGE)
    unknown = {"tuning": "unknown", "earlier_runs": "unknown"}
    known = {**dict.fromkeys(STATED, "not stated"), **unknown, **report.stated}
    stated = (f"{what}: {known[key]}." for key, what in STATED.items())
    yield Part("What only you know", (Items(tuple(stated)),), PAGE)
    yield Part("Of which run", (_facts(report),), PAGE)
    words = tuple(f"{word}: {meaning}." for word, meaning in definitions.PAGE.items())
    yield Part("Ten words", (Items(words),), PAGE)


def _guarantee(report: PrivacyReport, condition: str) -> Iterator[str]:
    """Yield the guarantee with unit, adjacency and releases, a bound on attacks, and the accountant.

    Args:
        condition: Condition under which the run has the adversary of `about`. It may be empty.
    """
    row, clients = report.about, report.num_clients
    adversary = adversary_phrase(row) + (f" ({condition})" if condition else "")
    is_finite = row.verdict != NO_GUARANTEE and math.isfinite(row.epsilon)
    epsilon = f"epsilon is {format_epsilon(row.epsilon)}" if is_finite else "no epsilon holds"
    yield (
        f"For one client with all its data, {epsilon} at delta {report.delta:g} (1/n is {1.0 / clients:.3g} "
        f"for n = {clients:,} clients) under replace-one adjacency, against {adversary}, over "
        f"{report.rounds:,} rounds and the model that each of them releases."
    )
    if row.neighbours == Neighbours.ZERO_OUT.value and is_finite:
        yield f"Under zero-out adjacency, it is {format_epsilon(row.epsilon_run)}."
    if report.smaller_delta is not None:
        delta, spent = report.smaller_delta
        yield f"At the smaller delta {delta:g}, it is {format_epsilon(spent)}."
    if is_finite:
        yield (
            "An attack that guesses between the client's data and any other data is right at most "
            f"{attack_accuracy(row.epsilon, row.delta)} of the time at even odds, where a random guess is "
            f"right 50% of the time. Outcomes are at most {format_times(row.epsilon)} as likely, delta aside."
        )
    yield (
        f"Accountant: lightning_fedq {report.origin.version}, {row.method}. What a mechanism claims of one "
        "round is proved, and its epsilon over the run is computed numerically and rounded up. Not audited "
        "by an outside party."
    )


def attack_accuracy(epsilon: float, delta: float) -> str:
    """Return the largest share of right guesses between two inputs at even odds.

    It is (e^epsilon + delta) / (1 + e^epsilon), rounded up.

    Source: Kairouz, Oh, Viswanath, The Composition Theorem for Differential Privacy, 2015, theorem 2.1.

    Examples:
        >>> attack_accuracy(1.0, 1e-5), attack_accuracy(8.0, 1e-5)
        ('73.2%', '99.97%')
    """
    wrong = (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0)))
    digits = 1 if wrong > 0.001 else 2
    return f"{100.0 - math.floor(wrong * 100.0 * 10**digits) / 10**digits:.{digits}f}%"


def _adversary_table(report: PrivacyReport, report_lines: Sequence[ReportRow]) -> Table:
    """Return the table of adversaries: epsilon, verdict and condition."""
    rows: list[tuple[str, ...]] = []
    group = ""
    for line in report_lines:
        if line.group != group:
            group = line.group
            rows.append((group if report.secure_keys else f"{group}, had keys been secret",))
        who = f"{MARK if line.asked else ''}{line.row.title}"
        rows.append((who, line.epsilon, line.row.verdict, line.when))
    return Table(("who", "epsilon", "verdict", "condition"), tuple(rows), COLOURS)


def _assumption_list(report_lines: Sequence[ReportRow], samples: SampleStatement | None) -> Table:
    """Return the table of assumptions by kind, with the responsible party of each.

    Assumptions of every useful row come first, and those of `DPSGD` last.
    """
    titles_and_sentences: dict[Kind, tuple[dict[str, None], dict[str, None]]] = {}
    useful = [line.row for line in report_lines if line.useful] or [line.row for line in report_lines]
    for row in useful:
        for sentence in row.assumptions:
            for kind in kinds_of(sentence):
                titles, quoted = titles_and_sentences.setdefault(kind, ({}, {}))
                titles[row.title] = quoted[sentence] = None
    rows = []
    for kind, (titles, quoted) in titles_and_sentences.items():
        if kind.who:
            what = f"{kind.term} {'; '.join(quoted)}" if kind.term.endswith(":") else kind.term
            rows.append((what, kind.who, "every row" if len(titles) == len(useful) else ", ".join(titles)))
    rows.sort(key=lambda row: row[2] != "every row")
    if samples is not None:
        rows += [(what, who, "rows of DPSGD") for what, who in samples.assumptions]
    rows = rows or [("nothing", "", "every row")]
    return Table(("what", "responsible party", "for"), tuple(rows))


def _merge_equal_texts(named_texts: Iterator[tuple[str, str]]) -> tuple[str, ...]:
    """Return one line per text, with the names of all pairs (name, text) that have it."""
    names_by_text: dict[str, list[str]] = {}
    for name, text in named_texts:
        names_by_text.setdefault(text, []).append(name)
    return tuple(f"{', '.join(names)}: {text}" for text, names in names_by_text.items() if text)


def _facts(report: PrivacyReport) -> Table:
    """Return the table of the run's settings."""
    # settings of other libraries are accounted for as a single number, for vectors of any length
    length = f"; {report.dim:,} parameters" if report.dim > 1 else ""
    name, _, settings = report.mechanism.partition("(")
    scope = f"the mechanism's, of one {report.rows[0].unit}, and no result of this run"
    settings = settings.removesuffix(")")
    if re.search(r"\bepsilon=", settings):
        settings += f" (epsilon is {scope})"
    origin = report.origin
    rows = [
        ("mechanism", f"{name}{length}"),
        ("settings", settings or "none"),
        ("clients", f"{report.cohort_size:,} of {report.num_clients:,} a round"),
        ("rounds", f"{report.rounds:,} {_TENSE[report.state].rounds}"),
        ("ended", report.ended),
        ("delta", f"{report.delta:g}"),
        ("keys", "from the operating system" if report.secure_keys else "from a seed"),
        ("masks", _masks(report)),
        ("written", f"{origin.made}, lightning_fedq {origin.version}"),
        ("config sha256", origin.config),
        ("model sha256", origin.model),
        ("all figures", "report.md and privacy.json of this folder, or `fedq privacy` with the folder"),
    ]
    return Table(("what", ""), tuple(row for row in rows if row[1]))


def _open_assumptions(report_lines: Sequence[ReportRow]) -> Table:
    """Return the table of figures: every row's epsilons, delta, infinite mass and accounting method."""
    heads = ("who", "compared", "unit", "unit, pure", "a round", "the run", "any two updates", "delta")
    rows = []
    for line in report_lines:
        row = line.row
        numbers = (row.epsilon_unit, row.epsilon_round, row.epsilon_run, row.epsilon)
        printed = [format_epsilon(number) for number in numbers]
        if line.epsilon == NOT_RUN:
            printed[2:] = [NOT_RUN, NOT_RUN]
        last = (f"{row.delta:g}", f"{row.infinite_mass:.3g}", row.method)
        rows.append((row.title, _COMPARED[row.neighbours], row.unit, *printed, *last))
    return Table((*heads, "infinite mass", "method"), tuple(rows))


def _charged(report: PrivacyReport) -> Table:
    """Return the table of the spending of all clients. The rows of the report state the largest of it."""
    names = list(report.charged[0].epsilons)
    rows = [
        (str(kind.clients), str(kind.charges), *(format_epsilon(kind.epsilons[name]) for name in names))
        for kind in report.charged
    ]
    return Table(("clients", "rounds charged, at most", *map(adversary_title, names)), tuple(rows))


def sample_table(samples: SampleStatement) -> Table:
    """Return the table of figures of DP-SGD's account."""
    heads = ("accounts", "steps", "noise multiplier", "gradient norm", "sampling rate")
    figures = ((samples.noise_multiplier, "g"), (samples.max_grad_norm, "g"), (samples.sample_rate, ".3g"))
    printed = ("not known" if value is None else format(value, form) for value, form in figures)
    return Table(heads, ((str(samples.data_sets), str(samples.steps), *printed),))
