"""Cures that another test runs, and cures that no test runs yet."""

_TARGET = "federation/test_privacy_target.py::"
_LEDGER = "callbacks/test_federated_ledger.py::"
TESTED = {
    "let max_epochs be the rounds that the first training was calibrated for less those": _TARGET
    + "test_a_ledger_of_other_settings_is_refused_when_the_mechanism_is_known_and_the_cure_works",
    "hangs on it; go on with the settings of the charged rounds": _LEDGER
    + "test_rounds_are_not_priced_by_the_terms_of_later_ones",
}
"""A piece of the error, and the test that runs its cure."""

NOT_RUN = {
    "clients of {} keep vectors, in one process; use devices=1",
    "rank {} of {} gets no answer from another rank, so the run ends here; see what that one says, and go",
    "rank {} is at {} while rank {} is at {}; let all ranks do the same, and stop on all of them where on",
    "this client and the server differ: {}; run the same code and settings on both",
    "a client without a seed keeps keys and the log of its streams in a folder of its own; start the Supe",
    "this client's folder {} is of federation {}, the server's is {}; take a new folder for a new federat",
    "this client's folder {} is a copy of {}, which is still there: each would count its own messages onl",
    "{} is missing, so what these keys have encoded is not known; put it back, or begin a new federation ",
    "{} {} a list of who takes back whose noise; run the same version on both sides",
    "secure aggregation keeps its state between messages in a folder of the client's own; start the Super",
    "no round has begun; ask after strategy.start",
    "ReduceLROnPlateau follows a validation metric, which the server has and clients do not; use a schedu",
    "{} draws the batches of clients, and the server has none; leave it out",
    "{} works on updates, which a server is never given; leave it out",
    "{} works on clients that are simulated here, and the server has none; leave it out",
    "{} is damaged; put it back, or begin a new federation in another folder",
    "{} is a metric object that clients update in training, and every rank's own has seen its own clients",
    '{}; train in one process (devices=1), or leave it out with strategy="{}"',
    "the data of clients {} are streams, and every rank would read its own copy; train in one process (de",
    "rank {} was started with other settings than rank 0: ; start all ranks with the same program, argume",
    "a callback that changes updates, or clients that lie, need all clients in one process; leave it out,",
    "the checkpoint's clients keep {}, these {}; use the checkpoint's own model",
    "a run needs a number of rounds, got trainer.max_epochs={}; give one",
    "--mean belongs to --selection tnb; add it, or leave --mean out",
    "{} has a logger of its own, which would tell how many runs there were; set trainer.logger ",
    "found no column 'label' or 'labels' among {}; say which column is the label, e.g. Federate",
    "secret cohorts need {}; or leave cohorts out",
    "the privacy budget allows {} rounds, and round {} would be one more; raise the budget, or ",
    "charges tell who was drawn, and cohorts are secret: leave charges out, or secret_cohorts",
    "a {} has no Renyi divergences and no largest loss, so nothing is known of the best of seve",
    "a {} has no Renyi divergence; see `run_loss`",
}
"""The beginnings of errors whose cures no test runs. This list gets shorter only."""
