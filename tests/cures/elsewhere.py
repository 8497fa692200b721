"""Cures that another test runs, and cures that no test runs yet."""

_TARGET = "training/test_privacy_target.py::"
_SAME = "flower/test_same_training.py::"
_LEDGER = "callbacks/test_federated_ledger.py::"
_CONSTRAINTS = "training/test_constraints.py::"
_LAST = "flower/test_store.py::test_a_checkpoint_that_is_lost_or_damaged_is_named_with_its_cure"
_RECORDS = "training/test_linear_bytes.py::test_records_that_are_not_the_checkpoint_s_are_named"
TESTED = {
    "is of a run that was charged for {} rounds, got --rounds {}; leave it out for what they cost": (
        "commands/test_privacy.py::test_rounds_to_come_add_to_those_that_were_charged"
    ),
    "a process of the comparison ended in the middle of a run (memory?)": (
        "comparison/test_comparison.py::test_a_process_that_is_killed_ends_it_with_a_cure"
    ),
    "the checkpoint has charged rounds and names no journal, so what was sent after it is not known": (
        "training/test_journal_at_save.py"
        "::test_a_checkpoint_that_names_no_journal_is_refused_with_secret_keys_and_with_a_seed_not"
    ),
    "parameters in the optimiser are not the module's (shapes {}), so that no update carries": (
        "training/test_checks.py::test_parameters_that_the_module_does_not_own_are_refused_with_a_cure_that_helps"
    ),
    "watches {}, which clients log in training, and the server hears nothing": (
        "flower/test_same_training.py::test_a_plateau_of_what_clients_log_is_refused_before_anybody_is_charged"
    ),
    "these settings measure nothing; give both sides evaluate_clients": (
        "flower/test_remote_evaluator.py::test_what_cannot_be_is_refused_before_anybody_is_charged"
    ),
    "is the folder of a federation with other settings ({}); put these back": (
        "flower/test_registration.py::test_an_old_home_with_new_settings_is_named"
    ),
    "this client answers {} at most; give both sides' trainers the same max_epochs": (
        "flower/test_bounds.py::test_a_deployment_says_its_rounds"
    ),
    "holds no keys, and this client has registered: it was emptied": (
        "flower/test_away.py::test_a_folder_that_is_emptied_in_mid_run_is_named"
    ),
    "the data are a stream (an IterableDataset)": "flower/test_engines.py::test_each_feature_over_flower",
    "this round freezes {}, which has been trained, and real clients": (
        "flower/test_unfreezing.py::test_to_freeze_what_was_trained_is_refused_before_the_round_is_charged"
    ),
    "this round trains {}, which a callback or hook has given to optimisers": (
        "flower/test_unfreezing.py::test_optimisers_must_hold_what_is_ever_trained"
    ),
    "puts weights in that follow from what hooks of batches or steps have kept": (
        "isolation/test_stale.py::test_what_follows_from_the_model_ends_as_plain_training"
    ),
    "training_step seeds {}, so that its draws are known": (
        "callbacks/test_dpsgd_draws.py::test_draws_that_no_secret_reaches_are_refused"
    ),
    "samples, and training on it fails ({}); use drop_last=True": (
        "training/test_smallest_batch.py::test_is_refused_by_name_with_the_cure"
    ),
    "which no update carries, because a client's first steps left it": (
        "training/test_late_state.py::test_one_client_is_the_plain_training"
    ),
    "a constraint must return finite values of shape {}": _CONSTRAINTS + "test_one_s_own_constraint",
    "and is not finite before training, so that no difference": _CONSTRAINTS + "test_observers",
    "use the model and `local` that it has begun with, or begin a new federation": _SAME
    + "test_a_state_file_that_is_not_the_client_s_is_named",
    "give it its own folder, or": _SAME + "test_a_state_file_that_is_not_the_client_s_is_named",
    "is damaged; put a whole copy of it back": _SAME + "test_a_state_file_that_is_not_the_client_s_is_named",
    "know how many they take; say local_steps=..., or max_epochs": _SAME
    + "test_max_steps_needs_to_know_the_steps_of_a_round",
    "whom nobody knows over a network; say local_steps=..., or {}": _SAME
    + "test_a_mean_of_all_batches_needs_to_know_how_many",
    "so what others count is not known; {}": _SAME + "test_a_layer_that_counts_otherwise_is_named",
    "let max_epochs be the rounds that the first training was calibrated for less those": _TARGET
    + "test_a_ledger_of_other_settings_is_refused_when_the_mechanism_is_known_and_the_cure_works",
    "what earlier batches have left behind changes the gradients": (
        "callbacks/test_dpsgd_between_steps.py::test_averages_of_weights_and_counts_of_steps_train"
    ),
    "show hooks no gradient of each sample, which DPSGD clips; put {}": (
        "callbacks/test_dpsgd_sequences.py::test_what_takes_their_place_trains"
    ),
    "an EmbeddingBag has no gradients of each sample but for one row": (
        "training/test_constant.py::test_a_padding_row_stays_in_steps_with_noise"
    ),
    "gradients of a sample in a batch differ from those of the sample alone": (
        "callbacks/test_dpsgd_guards.py::test_a_batch_that_is_sorted_before_all_layers_is_welcome"
    ),
    "found no column 'label' or 'labels' among {}": "data/test_hugging_face.py::test_labels",
    "a stream serves one payload. Abandon the round": (
        "privacy/test_ledger.py::test_the_engine_refuses_to_start_a_round_twice"
    ),
    "rank {} is at {} while rank {} is at": (
        "training/test_rank_group.py::test_objects_of_any_length_arrive_in_the_order_of_ranks"
    ),
    "rank {} of {} gets no answer from another rank": (
        "training/test_rank_processes.py"
        "::test_a_rank_that_is_killed_ends_the_run_which_goes_on_with_any_number_of_ranks"
    ),
    "rounds, is missing; put it back": _RECORDS,
    "it is not what this checkpoint's {} rounds have written": _RECORDS,
    "{} has charges and {} is missing: put a whole copy of it back. Without one, begin a new": _LAST,
    "{} is cut off or damaged ({} bytes): put a whole copy of it back. Without one, begin a new": _LAST,
    "{} is damaged in its part {}: put a whole copy of it back. Without one, begin a new": _LAST,
    "are connected and have not answered; look at their logs, or start more SuperNodes": (
        "flower/test_registration.py::test_who_is_missing_is_named_after_the_time_to_wait"
    ),
    "is not begun and nobody is charged for it: {}; {}; then start this run again with the same home": (
        "flower/test_too_few.py::test_a_round_that_would_be_given_up_is_not_charged"
    ),
    "AES by this CPU's instructions is not AES by OpenSSL": (
        "keys/test_keystream.py::test_other_cpus_draw_the_same_words"
    ),
    "no {} in {}; set data.root, or FEDQ_DATA": "data/datasets/test_vision.py::test_mnist_official_split",
    "hangs on it; go on with the settings of the charged rounds": _LEDGER
    + "test_rounds_are_not_priced_by_the_terms_of_later_ones",
}
"""A piece of the error, and the test that runs its cure."""

NOT_RUN = (
    "torch {} keeps its random generator in a way that is not known here",  # no such torch is at hand
)
"""Beginnings of errors whose cures no test can run, with the reason beside each."""
