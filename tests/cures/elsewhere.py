"""Cures that another test runs, and cures that no test runs yet."""

_TARGET = "training/test_privacy_target.py::"
_SAME = "flower/test_same_training.py::"
_LEDGER = "callbacks/test_federated_ledger.py::"
_CONSTRAINTS = "training/test_constraints.py::"
_LAST = "flower/test_store.py::test_a_checkpoint_that_is_lost_or_damaged_is_named_with_its_cure"
_RECORDS = "training/test_linear_bytes.py::test_records_that_are_not_the_checkpoint_s_are_named"
_HANDED = (
    "mechanisms/test_handed_on_gaussian.py"
    "::test_a_second_attempt_with_the_same_shares_is_refused_with_the_cure"
)
_LAWS = "privacy/test_own_cohort_laws.py::test_the_cures_of_refused_laws_help"
_OWN_BACKWARD = "callbacks/test_dpsgd_own_backward.py::test_input_gradients_in_validation_change_nothing"
TESTED = {
    "Begin a new block: since=({}, {}) and no predecessors": _HANDED,
    "Begin a new block at a repeated round": (
        "mechanisms/test_banded_gaussian.py::test_a_repeated_round_is_no_part_of_the_block_that_it_left"
    ),
    "Keep the checkpoint's noise, batch_size, local_epochs, local_steps and limit_train_batches": (
        "callbacks/test_dpsgd_clients.py"
        "::test_without_a_seed_rounds_must_cost_what_they_cost_in_the_checkpoint"
    ),
    "per-sample losses and is now the sum. Use one reduction": (
        "callbacks/test_decided_once.py::test_where_a_later_look_can_not_tell_the_first_answer_stays"
    ),
    "knows who took part. Use adversary='outsider'": _LAWS,
    "is not a frozen dataclass. Add @dataclass(frozen=True)": _LAWS,
    "is secret, but has no account of its draw. Use FixedSize": _LAWS,
    "drew different cohorts in two calls for round {}. Use only its stream": _LAWS,
    "was charged for {} rounds, got --rounds {}. Omit --rounds": (
        "commands/test_privacy.py::test_rounds_to_come_add_to_those_that_were_charged"
    ),
    "A worker process ended during a run": (
        "comparison/test_comparison.py::test_a_process_that_is_killed_ends_it_with_a_cure"
    ),
    "The checkpoint has charged rounds but names no journal, so later charges are not known": (
        "training/test_journal_at_save.py"
        "::test_a_checkpoint_that_names_no_journal_is_refused_with_secret_keys_and_with_a_seed_not"
    ),
    "parameters in the optimiser are not the module's (shapes {}), so no update contains them. Make": (
        "training/test_checks.py::test_parameters_that_the_module_does_not_own_are_refused_with_a_cure_that_helps"
    ),
    "watches {}, which clients log only in training. Watch a metric of the server's validation": (
        "flower/test_same_training.py::test_a_plateau_of_what_clients_log_is_refused_before_anybody_is_charged"
    ),
    "the server asks to measure. Set evaluate_clients on both sides": (
        "flower/test_remote_evaluator.py::test_what_cannot_be_is_refused_before_anybody_is_charged"
    ),
    "are compiled, which hides per-sample gradients from hooks. Train them without": _OWN_BACKWARD,
    "must return one number, got a loss of shape {}. Return the mean over samples": _OWN_BACKWARD,
    "depends on no parameter that requires a gradient. Return a loss of the parameters": _OWN_BACKWARD,
    "training_step runs a backward pass of its own through {}": _OWN_BACKWARD,
    "got gradients of a pass that was not recorded in training_step. Leave out": _OWN_BACKWARD,
    "Another process answers a message in {}. Give each client its own folder": (
        "flower/test_one_folder.py::test_a_second_process_waits_and_is_then_refused"
    ),
    "was written by lightning_fedq {} (protocol {}), this is {}": (
        "flower/test_one_folder.py::test_an_older_release_names_the_newer_one"
    ),
    "counts steps, which are unknown over a network. Set Federated(local_steps=...), or every_n_epochs": (
        "flower/test_client_refusals.py::test_checkpoints_by_steps_need_to_know_the_steps"
    ),
    "leaves this client without a batch. Use a larger limit": (
        "flower/test_client_refusals.py::test_a_limit_that_is_large_enough_registers"
    ),
    "has a federation with other settings ({}). Restore them": (
        "flower/test_registration.py::test_an_old_home_with_new_settings_is_named"
    ),
    "but this client answers at most {}. Give both sides' trainers the same max_epochs": (
        "flower/test_bounds.py::test_a_deployment_says_its_rounds"
    ),
    "has no keys, but this client has registered: the folder was emptied": (
        "flower/test_away.py::test_a_folder_that_is_emptied_in_mid_run_is_named"
    ),
    "must be a map-style Dataset, got a stream (an IterableDataset)": (
        "flower/test_engines.py::test_each_feature_over_flower"
    ),
    "This round freezes {}, which was trained and then no longer travels": (
        "flower/test_unfreezing.py::test_to_freeze_what_was_trained_is_refused_before_the_round_is_charged"
    ),
    "This round trains {}, which clients' optimisers do not have": (
        "flower/test_unfreezing.py::test_optimisers_must_hold_what_is_ever_trained"
    ),
    "loads weights (such as an average) that hooks of batches or steps keep outside": (
        "isolation/test_stale.py::test_what_follows_from_the_model_ends_as_plain_training"
    ),
    "training_step seeds {}, so its random draws are not secret": (
        "callbacks/test_dpsgd_draws.py::test_draws_that_no_secret_reaches_are_refused"
    ),
    "samples, and training on it fails ({}). Use drop_last=True": (
        "training/test_smallest_batch.py::test_is_refused_by_name_with_the_cure"
    ),
    "which clients don't send, because the first steps left it unchanged": (
        "training/test_late_state.py::test_one_client_is_the_plain_training"
    ),
    "A constraint must return finite values of shape {}": _CONSTRAINTS + "test_one_s_own_constraint",
    "is not finite before training, so clients can't send its difference": _CONSTRAINTS + "test_observers",
    "Restore the model and `personal_parameters`, or begin a new federation": _SAME
    + "test_a_state_file_that_is_not_the_client_s_is_named",
    "Use a separate folder, or": _SAME + "test_a_state_file_that_is_not_the_client_s_is_named",
    "is damaged. Restore a complete copy": _SAME + "test_a_state_file_that_is_not_the_client_s_is_named",
    "which the server does not know. Set local_steps=..., or max_epochs": _SAME
    + "test_max_steps_needs_to_know_the_steps_of_a_round",
    "unknown over a network. Set local_steps=..., or {}": _SAME
    + "test_a_mean_of_all_batches_needs_to_know_how_many",
    "batches, but this client trained on {}: {}": _SAME + "test_a_layer_that_counts_otherwise_is_named",
    "Set max_epochs to the calibrated rounds less those": _TARGET
    + "test_a_ledger_of_other_settings_is_refused_when_the_mechanism_is_known_and_the_cure_works",
    "Gradients depend on state that earlier batches changed": (
        "callbacks/test_dpsgd_between_steps.py::test_averages_of_weights_and_counts_of_steps_train"
    ),
    "Layers {} give hooks no per-sample gradients. Replace them by {}": (
        "callbacks/test_dpsgd_sequences.py::test_what_takes_their_place_trains"
    ),
    "DPSGD needs an EmbeddingBag that sums or averages one row of words": (
        "training/test_constant.py::test_a_padding_row_stays_in_steps_with_noise"
    ),
    "Gradients of a sample in a batch differ from those of the sample alone": (
        "callbacks/test_dpsgd_guards.py::test_a_batch_that_is_sorted_before_all_layers_is_welcome"
    ),
    "Found no column 'label' or 'labels' among {}": "data/test_hugging_face.py::test_labels",
    "was already charged for clients {}. Abandon the round": (
        "privacy/test_ledger.py::test_the_engine_refuses_to_start_a_round_twice"
    ),
    "Rank {} is at {} while rank {} is at": (
        "training/test_rank_group.py::test_objects_of_any_length_arrive_in_the_order_of_ranks"
    ),
    "Rank {} of {} gets no answer from another rank": (
        "training/test_rank_processes.py"
        "::test_a_rank_that_is_killed_ends_the_run_which_goes_on_with_any_number_of_ranks"
    ),
    "rounds is missing. Put it next to the checkpoint": _RECORDS,
    "it differs from the records of this checkpoint's {} rounds. Put a whole copy": _RECORDS,
    "{} has charges, but {} is missing: restore a copy. Without one, use new folders": _LAST,
    "{} is cut off or damaged ({} bytes): restore a copy. Without one, use new folders": _LAST,
    "{} is damaged in its part {}: restore a copy. Without one, use new folders": _LAST,
    "are connected and have not answered: look at their logs, or start more SuperNodes": (
        "flower/test_registration.py::test_who_is_missing_is_named_after_the_time_to_wait"
    ),
    "has not begun and nobody is charged: {}. {}. Then start this run again with the same home": (
        "flower/test_too_few.py::test_a_round_that_would_be_given_up_is_not_charged"
    ),
    "Found no {} in {}. Set data.root, or": "data/datasets/test_vision.py::test_mnist_official_split",
    "which changes their cost. Go on with the settings and the version of the charged": _LEDGER
    + "test_rounds_are_not_priced_by_the_terms_of_later_ones",
}
"""A piece of the error, and the test that runs its cure."""

NOT_RUN = (
    "The generator state of torch {} has an unknown layout",  # no such torch is at hand
)
"""Beginnings of errors whose cures no test can run, with the reason beside each."""
