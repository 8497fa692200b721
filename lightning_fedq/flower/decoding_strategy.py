"""A wrapper of a Flower strategy: packed messages in, and the strategy is given their decoded mean.

    strategy = DecodingStrategy(FedAvg(), federated)

The server's half of `encoding_mod`. Cohorts are drawn here, because the claims rest on how; what the clients
are sent is the strategy's, and so is the step: it is handed one reply, the model moved by the mean update.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from lightning_fedq._lightning import rank_zero_warn
from lightning_fedq.callbacks import Federated
from lightning_fedq.flower.cohort import Cohort, wait_for_enough
from lightning_fedq.flower.exchange import Exchange
from lightning_fedq.flower.flat_arrays import Flat
from lightning_fedq.flower.roster import Roster
from lightning_fedq.flower.secure import remote_sums
from lightning_fedq.flower.settings import (
    check_identities,
    check_trained_elsewhere,
    common_settings,
    of_real_clients,
    time_limit,
)
from lightning_fedq.flower.store import Store
from lightning_fedq.privacy.journal import Journal
from lightning_fedq.privacy.ledger import Ledger
from lightning_fedq.privacy.report import PrivacyReport, privacy_report
from lightning_fedq.rounds import RoundRecord, RoundServer
from lightning_fedq.training.described import run_of_server, run_to_charge
from lightning_fedq.training.records import warn_of

_SINGLE = (Bulyan, FedMedian, FedTrimmedAvg, FedXgbBagging, FedXgbCyclic, Krum, MultiKrum, QFedAvg)


class DecodingStrategy(Strategy):  # type: ignore[misc]
    """A Flower strategy over clients with `encoding_mod`.

    Every client of a round is charged in the ledger before it is asked; the journal in the server's folder
    outlives the process. A server that is started again goes on with rounds that nobody has used.

    Args:
        strategy: `FedAvg` or one of its kind that steps along the mean, such as `FedAdam` or `FedProx`.
        federated: The federation's settings, the same as the clients'.
        home: The server's folder: keys, roster, the ledger's journal.
        wait: Seconds to wait for `num_clients` clients before the first round.
        round_timeout: Seconds in which a client has to answer, training included, as `timeout` of the
            strategy's `start`.
        directory: Directory of identities, as for `server_app`.

    Attributes:
        ledger: Privacy ledger: rounds charged per client.
        records: One record for every finished round.

    Raises:
        TypeError: If the strategy looks at single replies, which nobody has here.
        ValueError: If a setting is the train function's business, or for simulations only, or the directory
            is missing.
    """

    def __init__(
        self,
        strategy: FedAvg,
        federated: Federated,
        *,
        home: str | Path = "fedq-server",
        wait: float = 600.0,
        round_timeout: float | None = None,
        directory: Mapping[int, Ed25519PublicKey] | None = None,
    ) -> None:
        if not isinstance(strategy, FedAvg) or isinstance(strategy, _SINGLE):
            raise TypeError(
                f"{type(strategy).__name__} looks at single replies, and what is decoded is the mean; wrap "
                "FedAvg, FedAvgM, FedProx, FedAdam, FedAdagrad or FedYogi, or use server_app, which has "
                "aggregators"
            )
        check_trained_elsewhere(federated)
        check_identities(federated, directory is not None, "DecodingStrategy(directory=...)")
        if federated.seed is None and federated.planner.num_cohorts is not None:
            raise ValueError(
                "a strategy keeps no checkpoint, so a server that is started again would deal other cohorts; "
                "use participation='random', or server_app"
            )
        self._strategy, self._federated, self._home = strategy, federated, Path(home)
        self._wait, self._timeout, self._directory = wait, time_limit(federated, round_timeout), directory
        self.ledger = federated.ledger
        if federated.owns_ledger:  # the journal is told to one ledger once
            self.ledger = Ledger(federated.clients.num_clients, repr(federated.mechanism))
        self.records: list[RoundRecord] = []
        self._server: RoundServer | None = None
        self._cohort: Cohort | None = None
        self._flat: Flat | None = None

    def summary(self) -> None:
        """See Flower."""
        self._strategy.summary()

    # ---- training -----------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open a round, and send its cohort what the strategy would send."""
        self._cohort = None
        sent = list(self._strategy.configure_train(server_round, arrays, config, grid))
        if not sent:
            return []
        content = sent[0].content
        if any(message.content is not content for message in sent) or len(content.array_records) != 1:
            raise TypeError(
                f"{type(self._strategy).__name__} sends clients different things, or several records of "
                "arrays; a round has one model for everybody"
            )
        flat = self._flat = Flat(next(iter(content.array_records.values())))
        if self._server is None:
            self._begin(flat, grid, sent[0].metadata.message_type)
        server = self._server
        assert server is not None
        if list(server.segments) != flat.sizes:
            raise ValueError(f"the arrays have sizes {flat.sizes} now, and had {list(server.segments)}")
        server.weights = flat.vector.clone()
        server.abandon()  # a round that Flower has given up
        wait_for_enough(server, self._roster, self._federated.server.secure_aggregation)
        server.start()
        cohort = self._cohort = Cohort(server, self._exchange, self._roster)
        messages = []
        for client, fields in cohort.questions().items():
            message = self._exchange.message("train", self._roster.nodes[client], fields, cohort.group)
            message.content = RecordDict({**content, **message.content})
            messages.append(message)
        return messages

    def _begin(self, flat: Flat, grid: Grid, message_type: str) -> None:
        federated = self._federated
        self._exchange = Exchange(grid, self._timeout, rank_zero_warn, message_type)
        words, store = common_settings(federated), Store(self._home)
        self._roster = Roster(federated, self._exchange, store, words, self._directory)
        self._roster.gather(self._wait)
        secagg, path = federated.server.secure_aggregation, self._home / "ledger.jsonl"
        used = Journal(path, self.ledger.mechanism, self.ledger.num_clients).unread()
        self.ledger.keep(
            Journal(path, self.ledger.mechanism, self.ledger.num_clients), federated.seed is not None
        )
        self._server = RoundServer(
            federated.mechanism,
            of_real_clients(federated).planner,
            self._roster.keys(),
            flat.vector,
            flat.sizes,
            federated.server.range_rule,
            target=federated.server.target,
            secure_sums=None if secagg is None else remote_sums(secagg, self._directory),
            ledger=self.ledger,
        )
        self._server.agree(run_to_charge(self._server, secagg, 0))
        if federated.seed is None:  # clients refuse what they have answered before
            self._server.round = max((entry.round + 1 for entry in used), default=0)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode, and let the strategy step along the mean. Without one, the model stays as it is."""
        if self._cohort is None:
            return None, None
        server, flat = self._server, self._flat
        assert server is not None and flat is not None
        answers = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if (fields := self._exchange.fields(node, reply)) is not None:
                answers[node] = fields
        self._cohort.conclude(self._cohort.by_client(answers))
        record = server.finish()
        self.records.append(record)
        warn_of(record)
        if record.aborted or not record.num_received:
            return None, None
        content = RecordDict(
            {
                self._strategy.arrayrecord_key: flat.record_of(server.weights),
                "metrics": MetricRecord({self._strategy.weighted_by_key: 1}),
            }
        )
        mean = Message(content, dst_node_id=0, message_type="train")
        arrays, _ = self._strategy.aggregate_train(server_round, [mean])
        values = {name: float(value) for name, value in record.metrics().items() if value == value}
        arrays = None if arrays is None else flat.like(arrays)  # averages make float64 of integers
        return arrays, MetricRecord({f"fed/{name}": value for name, value in values.items()})

    # ---- evaluation ---------------------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody: what clients measure on their own data would go round the mechanism."""
        if server_round == 1 and self._strategy.fraction_evaluate > 0.0:
            rank_zero_warn(
                "clients evaluate nothing: their metrics would go round the mechanism; give the strategy's "
                "start an evaluate_fn, which evaluates on the server"
            )
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing comes back."""
        return None

    # ---- privacy ------------------------------------------------------------------------------------------

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Privacy report of the run so far, adversary by adversary.

        Args:
            delta: In (0, 1 / num_clients).

        Raises:
            RuntimeError: Before the first round.
        """
        if self._server is None:
            raise RuntimeError("no round has begun; ask after strategy.start")
        secagg = self._federated.server.secure_aggregation
        return privacy_report(run_of_server(self._server, secagg), delta)
