"""Privacy document of a run: the content of a `PrivacyReport`, in the order and the words of every output.

Terminal, Markdown and HTML print the `document`, and JSON is the report itself. No other module words, groups
or orders a report. Each part has a depth. A short output prints the first parts, down to a smaller depth,
with the same words as the whole document.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from lightning_fedq.dpsgd.statement import SampleStatement
from lightning_fedq.functional.checks import from_plain
from lightning_fedq.mechanisms.interface import Adversary, Neighbours
from lightning_fedq.privacy.assumptions import Kind, kinds_of, with_terms
from lightning_fedq.privacy.report import STATED, PrivacyReport, Row, State, is_met
from lightning_fedq.privacy.secret_row import SECRET_COHORTS, adversary_title
from lightning_fedq.privacy.verdict import COLOURS, NO_GUARANTEE, NOT_RUN, VACUOUS, format_epsilon, scale

SCHEMA = "fedq-privacy/3"
"""First entry of the JSON. A file with another schema is refused."""
AT_THE_END, REPORT, WHOLE = 0, 1, 2
"""Depths of a terminal at the end of a fit, of `report.md` and of `privacy.md`."""

ORDER = (
    Adversary.SECAGG_SERVER,
    Adversary.SERVER,
    Adversary.EAVESDROPPER,
    Adversary.SERVER_AND_PARTNER,
    Adversary.CLIENT,
    Adversary.OUTSIDER,
)
"""Adversaries in the order in which tables for readers have them."""
PLACES = (*(who.name for who in ORDER), f"{Adversary.OUTSIDER.name}{SECRET_COHORTS}")
"""Names of rows in the same order, followed by the row for secret cohorts."""
FAILING = "if an assumption fails"


class _Tense(NamedTuple):
    """Words that depend on the state of a run."""

    title: str
    as_run: str
    rounds: str
    is_: str
    holds: str
    runs: str
    sees: str
    run: str


_TENSE: dict[State, _Tense] = {
    "planned": _Tense(
        *("What this run will protect, and from whom", "as it will run", "to come"),
        *("will be", "will hold", "runs", "will see", "will run"),
    ),
    "running": _Tense(
        *("What this run has protected so far, and from whom", "as it has run so far", "charged so far"),
        *("is", "holds", "runs", "sees", "run"),
    ),
    "ended": _Tense(
        *("What was protected, and from whom", "as it was run", "charged"),
        *("was", "held", "ran", "saw", "ran"),
    ),
}
_MACHINES = (
    "The rows say what each party sees in a federation of separate machines with these settings. An "
    "outsider's row is about what this run releases."
)
_NO_LENGTHS = (
    "not known (the checkpoint that this folder began with has no lengths of messages, or nobody learns "
    "how many clients took part)"
)
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


@dataclass(frozen=True)
class ReportRow:
    """A row as readers see it.

    Args:
        row: Row with its figures.
        group: Group of the row: "as it was run" in the tense of the state, "if an assumption fails", or
            "behind masks, ...".
        asked: Whether the target is about this row.
        epsilon: Printed epsilon over the run, under replace-one adjacency. "∞" without a bound, "not run" for
            masks that did not run.
        when: Condition under which the run has this adversary. It may be empty.
    """

    row: Row
    group: str
    asked: bool
    epsilon: str
    when: str

    @property
    def useful(self) -> bool:
        """Whether the bound excludes anything."""
        return self.row.verdict not in (VACUOUS, NO_GUARANTEE)


def report_rows(report: PrivacyReport) -> list[ReportRow]:
    """Return the rows as readers see them: first the group of the target's row, with that row at its top.

    With reproducible keys, the rows are those that secret keys would give.
    """
    as_run, report_lines = _TENSE[report.state].as_run, []
    masks_state = {"counted": "only counted", "assumed": "only assumed"}.get(report.masks, "not there")
    behind_masks = (
        f"behind secure aggregation, which {'was' if report.state == 'ended' else 'is'} {masks_state}"
    )
    for row in report.readable_rows:
        asked = report.asked is not None and report.asked.adversary == row.name
        hypothetical = _needs_masks(row) and not report.masked
        group = as_run if is_met(row, report.masked) else behind_masks if hypothetical else FAILING
        epsilon = NOT_RUN if hypothetical and report.masks == "none" else format_epsilon(row.epsilon)
        report_lines.append(ReportRow(row, group, asked, epsilon, _row_condition(row, report.masked)))
    groups = (as_run, FAILING, behind_masks)
    first = next((line.group for line in report_lines if line.asked), as_run)
    return sorted(
        report_lines,
        key=lambda line: (
            line.group != first,
            groups.index(line.group),
            not line.asked,
            not line.useful,
            PLACES.index(line.row.name),
        ),
    )


def _needs_masks(row: Row) -> bool:
    """Return whether a row is about the server behind secure aggregation."""
    return row.adversary == Adversary.SECAGG_SERVER.name


def _row_condition(row: Row, masked: bool) -> str:
    """Return the condition under which the run has the row's adversary, or ""."""
    if row.cohorts == "secret":
        return "nobody learns who took part"
    if masked and not is_met(row, True):
        return "masks are broken"
    if row.adversary == Adversary.SERVER_AND_PARTNER.name:
        return "a partner leaks"
    colluders, alone = row.colluders, row.adversary == Adversary.CLIENT.name
    if row.verdict == NO_GUARANTEE or not colluders or colluders == math.inf:
        return ""
    return "alone" if alone and colluders == 1 else f"with {colluders:g} colluders"


# ---- one row ------------------------------------------------------------------------------------------


class PrivacySummary(NamedTuple):
    """Privacy of a run in one cell of a table, or one entry of a legend.

    Args:
        who: Name of the row. "" where the run has no row of that name.
        epsilon: Epsilon over the run, under replace-one adjacency. None for masks that do not run.
        verdict: Verdict on epsilon.
        asked: Target of this row and whether it is met, in words. "" where the target is about another row.
        met: Whether the target is met. None where the target is about another row.
    """

    who: str
    epsilon: float | None
    verdict: str
    asked: str = ""
    met: bool | None = None

    @property
    def printed(self) -> str:
        """Printed epsilon, "not run", or "-" where there is no row."""
        return format_epsilon(self.epsilon) if self.epsilon is not None else NOT_RUN if self.who else "-"

    @property
    def label(self) -> str:
        """Entry of a legend."""
        if self.met is False:
            return "target NOT met"
        words = {NOT_RUN: "masks not run", "∞": "no finite ε", "-": ""}
        return words.get(self.printed, f"ε {self.printed}")


def summarise_privacy(report: PrivacyReport, adversary: str | None = None) -> PrivacySummary:
    """Return the privacy against one adversary. With reproducible keys there is none.

    Args:
        report: Report of the run.
        adversary: Name of a row. None is `PrivacyReport.about`.
    """
    row = (
        report.about
        if adversary is None
        else next((row for row in report.all_rows if row.name == adversary), None)
    )
    if row is None:
        return PrivacySummary("", None, "")
    summary = PrivacySummary(row.name, row.epsilon, row.verdict)
    if _needs_masks(row) and not report.masked:
        summary = PrivacySummary(row.name, None, NO_GUARANTEE)
    asked = report.asked
    if asked is None or asked.adversary != row.name:
        return summary
    over = "a round" if asked.over == "round" else "the run"
    return summary._replace(
        asked=f"asked for {asked.epsilon:g} over {over}: {_target_text(report)}", met=asked.met
    )


def common_adversary(reports: Sequence[PrivacyReport]) -> str:
    """Return the name of the row in which several runs are compared.

    Returns:
        Row of all targets, or of all `about` rows without targets, if they agree. Otherwise the outsider's
        row, which every run has.
    """
    asked = {report.asked.adversary for report in reports if report.asked is not None}
    candidates = asked or {report.about.name for report in reports}
    return candidates.pop() if len(candidates) == 1 else Adversary.OUTSIDER.name


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
    first = f"Asked for {wanted}, against {adversary_phrase(row)}: {_target_text(report)}"
    if not asked.met and _needs_masks(row) and not report.masked:
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


def _target_text(report: PrivacyReport) -> str:
    assert report.asked is not None
    if report.state == "planned":
        return "to be met" if report.asked.met else "will NOT be met"
    so_far = " so far" if report.state == "running" else ""
    return f"{'met' if report.asked.met else 'NOT met'}{so_far}"


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


def bits(report: PrivacyReport) -> str:
    """Return a sentence with the bits of uplink and downlink and their saving. "" if nothing is known."""
    report_bits = report.bits
    if report_bits is None:
        return ""
    if report_bits.update is None:
        return f"Bits a parameter: {_NO_LENGTHS}."
    approximately = "" if report_bits.measured else "about "
    hidden = report.masks in ("ran", "asked", "counted")
    word, total_up = "unmasked", report_bits.update
    if hidden:
        word = "masked" if report_bits.unmasked is None else f"masked ({report_bits.unmasked:.3g} unmasked)"
    keys = ""
    if report_bits.keys:
        total_up += report_bits.keys
        keys = f" + {report_bits.keys:.3g} keys and shares = {total_up:.3g}"
    rest = hidden and report_bits.keys is None
    text = f"Bits a parameter, one client in a round: up {approximately}{report_bits.update:.3g} {word}{keys}"
    text += ", keys and shares on top" if rest else ""
    if report_bits.down is not None:
        both = total_up + report_bits.down
        saved = 100.0 * (1.0 - both / 64.0)
        what = f"{saved:.0f}% less" if saved >= 0.0 else f"{-saved:.0f}% more"
        before = ", before keys and shares" if rest else ""
        text += (
            f"; down {approximately}{report_bits.down:.3g}"
            f"; both ways {both:.3g}, {what} than 32 each way{before}"
        )
    if report_bits.megabytes_up is not None:
        rounds = report.rounds if report_bits.rounds is None else report_bits.rounds
        text += f". All clients, {rounds:,} rounds: {report_bits.megabytes_up:.4g} MB up"
        down = report_bits.megabytes_down
        text += "" if down is None else f", {down:.4g} MB down"
    elif report_bits.measured:
        text += f". All clients: {_NO_LENGTHS}"
    return f"{text}."


# ---- parts --------------------------------------------------------------------------------------------


def document(report: PrivacyReport, depth: int = WHOLE) -> tuple[str, list[Part]]:
    """Return title and parts of the document, down to a depth."""
    parts = [part for part in _parts(report) if part.depth <= depth and part.blocks]
    return _TENSE[report.state].title, parts


def _parts(report: PrivacyReport) -> Iterator[Part]:
    """Yield all parts of the document, in their order."""
    report_lines = report_rows(report)
    yield Part("", tuple(text for text in (headline(report), caveat(report)) if text), AT_THE_END)
    sent = (text,) if (text := bits(report)) else ()
    yield Part("Who learns how much", (_adversary_table(report, report_lines), *sent), AT_THE_END)
    samples = report.samples
    over = "One client over the run, any update against any other. "
    yield Part(
        "What has to hold",
        (_assumption_list(report_lines, samples), f"{over}{scale().capitalize()}."),
        REPORT,
    )
    yield Part("Times", (report.times,) if report.times else (), REPORT)
    yield Part("Of which run", (_facts(report),), REPORT)
    if samples is not None:
        yield Part(
            "One sample of a client's data", (f"{samples.line[:1].upper()}{samples.line[1:]}.",), REPORT
        )
    yield Part("The guarantee in detail", (Items(tuple(_details(report))),), WHOLE)
    yield Part("Figures to check", (_open_assumptions(report_lines), _LEGEND), WHOLE)
    reasons = tuple(f"{line.row.title}, {line.group}: {line.row.sentence}" for line in report_lines)
    yield Part("What each row means", (Items(reasons),), WHOLE)
    yield Part("What has to hold, in full", (_full_assumptions(report_lines),), WHOLE)
    yield Part("Who sees what", (Items(tuple(f"{who.title}: {who.sees}" for who in ORDER)),), WHOLE)
    yield Part("How to read the numbers", (Items(report.notes),), WHOLE)
    advice = _merge_equal_texts((line.row.title, line.row.advice) for line in report_lines)
    if advice:
        yield Part("What would make it better", (Items(advice),), WHOLE)
    if report.charged:
        of_all = f"Epsilon of one client over the run, between any two updates, at delta {report.delta:g}."
        secret = "" if report.secure_keys else " With the secret keys that this run did not have."
        yield Part("Who was charged how often", (_charged(report), of_all + secret), WHOLE)
    if report.leaves:
        yield Part("What also leaves, without noise", (Items(report.leaves),), WHOLE)
    if samples is not None:
        yield Part("DP-SGD in the clients", (sample_table(samples), samples.about), WHOLE)


def _details(report: PrivacyReport) -> Iterator[str]:
    """Yield what a reader needs who has this page only: unit, adjacency, releases, an attack, sources."""
    row, stated = report.about, report.stated
    name = "zero-out" if row.neighbours == Neighbours.ZERO_OUT.value else "replace-one"
    yield f"Unit: one client with all its data. Adjacency: {name}."
    clients = report.num_clients
    yield f"Delta is {report.delta:g}, next to 1/n = {1.0 / clients:.3g} for n = {clients:,} clients."
    yield f"Released: the model of each round ({report.rounds:,}), not only the last one."
    if row.verdict != NO_GUARANTEE and math.isfinite(row.epsilon):
        yield (
            "An attack: whether the client's data or any other data were used is guessed right at most "
            f"{attack_accuracy(row.epsilon, row.delta)} of the time at even odds, by "
            f"{adversary_phrase(row)}. Guessing at random is right 50% of the time."
        )
    yield (
        f"Accountant: lightning_fedq {report.origin.version}, {row.method}. The claim of each row is "
        "proved, and its epsilon is computed numerically and rounded up. Not audited by an outside party."
    )
    for key, words in STATED.items():
        unknown = "unknown" if key in ("tuning", "earlier_runs") else "not stated"
        yield f"{words}: {stated.get(key, unknown)}."


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
    return Table(("what", "who sees to it", "for"), tuple(rows))


def _full_assumptions(report_lines: Sequence[ReportRow]) -> Items:
    """Return all assumptions in full: those of every row first, then those of single rows."""
    common_to_all = set.intersection(*(set(line.row.assumptions) for line in report_lines))
    special = _merge_equal_texts(
        (line.row.title, "; ".join(text for text in line.row.assumptions if text not in common_to_all))
        for line in report_lines
    )
    return Items((f"every row: {'; '.join(sorted(common_to_all)) or 'nothing'}", *special))


def _merge_equal_texts(named_texts: Iterator[tuple[str, str]]) -> tuple[str, ...]:
    """Return one line per text, with the names of all pairs (name, text) that have it."""
    names_by_text: dict[str, list[str]] = {}
    for name, text in named_texts:
        names_by_text.setdefault(text, []).append(name)
    return tuple(f"{', '.join(names)}: {text}" for text, names in names_by_text.items() if text)


def _facts(report: PrivacyReport) -> Table:
    # settings of other libraries are accounted for as a single number, for vectors of any length
    """Return the table of the run's settings."""
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


# ---- JSON ---------------------------------------------------------------------------------------------


def to_json(report: PrivacyReport) -> str:
    """Return the report as JSON, with group and condition of each row.

    Infinite numbers are the string "inf".

    `rows` are the rows that hold. With keys from a seed they promise nothing, and `with_secure_keys` has the
    rows that secret keys would give.
    """
    plain = asdict(report)
    for line in report_rows(report):
        details = {"name": line.row.name, "group": line.group, "asked": line.asked, "when": line.when}
        for row in (*plain["rows"], *plain["with_secure_keys"], plain["secret"] or {}):
            if (row.get("adversary"), row.get("cohorts")) == (line.row.adversary, line.row.cohorts):
                row |= {**details, "epsilon": max(row["epsilon_run"], row["epsilon_any_two"])}
    sentences = {text for row in (*report.all_rows, *report.with_secure_keys) for text in row.assumptions}
    plain["kinds"] = {text: [kind.term for kind in kinds_of(text)] for text in sorted(sentences)}
    first = {"schema": SCHEMA, "headline": headline(report), "caveat": caveat(report)}
    return json.dumps(_plain({**first, **plain}), indent=2, ensure_ascii=False)


def _plain(value: object) -> object:
    """Return a value with tuples as lists and infinite numbers as the string "inf"."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "inf" if value == math.inf else value


def _with_kinds(report: PrivacyReport, terms: dict[str, tuple[str, ...]]) -> PrivacyReport:
    """Return a report from a file with the kinds of its assumptions, whose terms the file has by sentence."""

    def named(row: Row) -> Row:
        return replace(row, assumptions=tuple(with_terms(text, terms[text]) for text in row.assumptions))

    secret = None if report.secret is None else named(report.secret)
    rows, secure = (tuple(map(named, rows)) for rows in (report.rows, report.with_secure_keys))
    return replace(report, rows=rows, with_secure_keys=secure, secret=secret)


class OtherVersionError(ValueError):
    """Error for a document that another version of this package wrote."""


def from_json(text: str) -> PrivacyReport:
    """Return the report of a `privacy.json`.

    The file may come from any source. Every value has its type, and every text can be printed.

    Raises:
        OtherVersionError: If the file has rows of another version.
        ValueError: If the file is not one that `to_json` writes.
    """
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and "rows" in fields and fields.get("schema") != SCHEMA:
            raise OtherVersionError(
                f"privacy.json is no {SCHEMA}, but of another version of this package. Compute it again: "
                "`fedq privacy CONFIG`, or `fedq privacy CKPT` with a checkpoint of the run"
            )
        if isinstance(fields, dict):
            fields = {"limit": "", **fields}  # earlier files do not name a budget
        report: PrivacyReport = from_plain(PrivacyReport, fields)
        terms = from_plain(dict[str, tuple[str, ...]], fields.get("kinds"), "kinds")
        stated = {text for row in (*report.all_rows, *report.with_secure_keys) for text in row.assumptions}
        if unknown := stated - terms.keys():
            raise ValueError(f"kinds has no entry for {unknown.pop()!r:.60}")
        report = _with_kinds(report, terms)
        names = sorted(Adversary.__members__)
        for rows in (report.rows, report.with_secure_keys or report.rows):
            if sorted(row.adversary for row in rows) != names:
                raise ValueError("there must be one row for each adversary")
        if {row.neighbours for row in report.readable_rows} - _COMPARED.keys():
            raise ValueError("neighbours has an unknown value")
        if report.asked is not None and report.asked.adversary not in {row.name for row in report.all_rows}:
            raise ValueError("the target is about a row that is missing")
    except OtherVersionError:
        raise
    except ValueError as error:
        raise ValueError(f"privacy.json can't be read: {error}") from None
    return report
