"""Faults planted in the source, by the lists of the specification, and the test that fails with each.

Each is a change of the library's text: every passage of `clean` occurs once in `file` and is replaced by the
passage of `faulty` at its place. `pytest tests/lab/audit/test_source_plants.py -m slow` plants them one
by one in a copy of the library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """One fault.

    Args:
        name: What is wrong.
        file: File in the library.
        change: (clean, faulty) passages.
        caught_by: The test that fails with it, as pytest names it, below `tests/`.
    """

    name: str
    file: str
    change: tuple[tuple[str, str], ...]
    caught_by: str


def _plant(name: str, file: str, clean: str, faulty: str, caught_by: str) -> Plant:
    return Plant(name, file, ((clean, faulty),), caught_by)


_CHECKS = "training/secret_cohorts.py"
SECRET_COHORTS = (
    _plant(
        "noise over the clip in place of over twice the clip",
        "mechanisms/bases/additive_noise.py",
        "GaussianSumLoss.of(self.multiplier, num_noises, note)",
        "GaussianSumLoss.of(2.0 * self.multiplier, num_noises, note)",
        "training/test_secret_cohorts.py::test_the_row_is_the_theorem_about_the_sum",
    ),
    Plant(
        "each coordinate is amplified by itself",
        "privacy/sampled.py",
        (
            (
                "composed_grid(loss, left / rounds, compositions, 1)",
                "composed_grid(loss, left / rounds, 1, 1)",
            ),
            (".composed(rounds, _TAIL", ".composed(rounds * compositions, _TAIL"),
        ),
        "privacy/test_sampled.py::test_a_round_is_drawn_as_a_whole",
    ),
    _plant(
        "the chance to be drawn is one client too small",
        "privacy/sampled.py",
        "q = drawn / population",
        "q = drawn / (population + 1)",
        "privacy/test_sampled.py::test_a_gaussian_round_meets_the_vectors_from_above",
    ),
    Plant(
        "one order of the two worlds only, not reflected",
        "privacy/sampled.py",
        (
            (
                "losses = np.concatenate([-places[::-1], [0.0], places])",
                "losses = np.log1p(q * np.expm1(-base.losses[above]))[::-1]\n"
                "    losses = np.concatenate([losses, [0.0], places])",
            ),
            (
                "rest = 1.0 - infinite - under_p.sum() - under_q.sum()",
                "masses = base.masses[above]\n"
                "    under_q = (1.0 - q) * masses + q * masses * np.exp(-base.losses[above])\n"
                "    under_q *= (1.0 - infinite - under_p.sum()) / under_q.sum()\n"
                "    rest = 0.0",
            ),
        ),
        "privacy/test_sampled.py::test_a_gaussian_round_meets_the_vectors_from_above",
    ),
    _plant(
        "losses below 0 are amplified, too",
        "privacy/sampled.py",
        "above = base.losses > 0.0",
        "above = base.losses > -math.inf",
        "privacy/test_sampled.py::test_a_gaussian_round_meets_the_vectors_from_above",
    ),
    _plant(
        "a claim from zero is amplified, too",
        "privacy/sampled.py",
        "    if neighbours is not Neighbours.SUBSTITUTION:",
        "    if False:",
        "privacy/test_sampled.py::test_what_the_theorem_does_not_cover_is_refused",
    ),
    _plant(
        "amplified, and multiplied by how often a client takes part",
        "privacy/account.py",
        "            population=self.run.num_clients,\n            rounds=rounds,",
        "            population=self.run.num_clients,\n"
        "            rounds=max(1, rounds * size // self.run.num_clients),",
        "training/test_secret_cohorts.py::test_the_row_is_the_theorem_about_the_sum",
    ),
    _plant(
        "the same cohort for two attempts",
        "rounds/plan.py",
        "self.cohort_key.draw(self.num_clients, size, round, attempt)",
        "self.cohort_key.draw(self.num_clients, size, round, 0)",
        "training/test_secret_cohorts.py::test_every_attempt_has_a_draw_of_its_own",
    ),
    _plant(
        "cohorts from the public seed",
        "rounds/plan.py",
        "        if self.cohort_key is not None:\n            return self.cohort_key",
        "        if False:\n            return self.cohort_key",
        "training/test_secret_cohorts.py::test_a_secret_cohort_does_not_follow_from_the_seed",
    ),
    _plant(
        "a target against a curious client is given the row",
        "privacy/target.py",
        "if adversary_named(self.adversary) is not Adversary.OUTSIDER and self.secret:",
        "if False:",
        "training/test_secret_cohorts.py::test_targets_and_budgets_are_about_outsiders_and_runs",
    ),
    _plant(
        "the row is kept where noise is correlated over rounds",
        "privacy/sampled.py",
        "if mechanism.separation > 1 or mechanism.hands_on:",
        "if False:",
        "training/test_secret_cohorts.py::test_a_report_states_no_such_epsilon_for_correlated_noise",
    ),
    _plant(
        "the row is kept with control variates",
        _CHECKS,
        "if algorithm is not None and algorithm.remembers:",
        "if False:",
        "training/test_secret_cohorts.py::test_each_condition_is_refused_by_name_with_the_cure",
    ),
    _plant(
        "the row is kept with limits by client",
        _CHECKS,
        "if engine.ledger.limits is not None:",
        "if False:",
        "training/test_secret_cohorts.py::test_each_condition_of_a_fit_is_refused_before_anything_is_charged",
    ),
    _plant(
        "the row is kept with weights",
        _CHECKS,
        'if server.weighting != "uniform":',
        "if False:",
        "training/test_secret_cohorts.py::test_each_condition_is_refused_by_name_with_the_cure",
    ),
    _plant(
        "the row is kept with dropouts",
        _CHECKS,
        "if planner.dropout_probability > 0.0:",
        "if False:",
        "training/test_secret_cohorts.py::test_each_condition_is_refused_by_name_with_the_cure",
    ),
    _plant(
        "a budget counts the charges of the most charged client",
        "callbacks/privacy.py",
        "account.epsilon(self.adversary, engine.ledger.rounds, secret=True)",
        "account.epsilon(self.adversary, engine.ledger.most_charged, secret=True)",
        "training/test_secret_cohorts.py::test_a_budget_counts_rounds_and_not_charges",
    ),
    _plant(
        "rounds that were given up do not count",
        "training/described.py",
        "    if charged == finished:",
        "    if charged >= finished:",
        "training/test_secret_cohorts.py::test_a_round_that_was_given_up_is_not_drawn_again",
    ),
    _plant(
        "charges are in the run's tables",
        "callbacks/run_folder.py",
        'if federated.clients.cohorts == "secret":  # both would tell',
        "if False:  # both would tell",
        "training/test_secret_cohorts.py::test_a_run_folder_tells_rounds_and_no_charges",
    ),
)

_HANDED_ON = "mechanisms/handed_on_gaussian.py"
HANDED_ON = (
    _plant(
        "rotation signs of each round",
        _HANDED_ON,
        "rand.of_round(*self._handed(context).since))",
        "rand)",
        "mechanisms/test_handed_on_blocks.py::test_released_noise_has_the_covariance_of_the_matrix",
    ),
    _plant(
        "a share's label without its producer",
        _HANDED_ON,
        "noise share of client {producer} in the block",
        "noise share of client {min(producer, successor)} in the block",
        "mechanisms/test_handed_on_gaussian.py::test_what_a_share_is_named_by",
    ),
    _plant(
        "a share's label without block and attempt",
        _HANDED_ON,
        "in the block of round {since[0]}, attempt {since[1]}",
        "",
        "mechanisms/test_handed_on_gaussian.py::test_shares_of_other_rounds_blocks_and_pairs_are_other_shares",
    ),
    _plant(
        "the successor takes the current round's stream",
        _HANDED_ON,
        "last = rand.of_round(context.round - 1, handed.since[1] if first else 0)",
        "last = rand",
        "mechanisms/test_handed_on_gaussian.py::test_a_successor_takes_back_four_fifths_of_the_share",
    ),
    _plant(
        "a block goes on in a second attempt, with the same shares",
        "mechanisms/interface/context.py",
        "repeated = round > first and attempt > 0",
        "repeated = False",
        "mechanisms/test_handed_on_gaussian.py::test_a_second_attempt_with_the_same_shares_is_refused_with_the_cure",
    ),
    Plant(
        "an engine's block goes on over a repeated round",
        "rounds/server.py",
        (
            (
                "self._since is None or self.attempt or self._somebody_is_early(plan, self._since[0])",
                "self._since is None",
            ),
            (
                "since is None or since[0] >= plan.round or self.attempt:",
                "since is None or since[0] >= plan.round:",
            ),
        ),
        "mechanisms/test_handed_on_blocks.py::test_a_repeated_round_and_what_follows_begin_anew",
    ),
    _plant(
        "added in place of subtracted",
        _HANDED_ON,
        "total - TAKEN_BACK * self._noise",
        "total + TAKEN_BACK * self._noise",
        "mechanisms/test_handed_on_gaussian.py::test_messages_are_the_integers_of_the_formula",
    ),
    _plant(
        "a predecessor's share is taken back twice",
        _HANDED_ON,
        "total - TAKEN_BACK * self._noise",
        "total - 2 * TAKEN_BACK * self._noise",
        "mechanisms/test_handed_on_gaussian.py::test_messages_are_the_integers_of_the_formula",
    ),
    _plant(
        "what is fresh is left out",
        _HANDED_ON,
        " + discrete_gaussian(fresh_std, count, fresh)",
        "",
        "mechanisms/test_handed_on_gaussian.py::test_fresh_noise_hides_the_lattice",
    ),
    _plant(
        "what is fresh is drawn from the share",
        _HANDED_ON,
        "discrete_gaussian(fresh_std, count, fresh)",
        "discrete_gaussian(fresh_std, count, own)",
        "mechanisms/test_handed_on_gaussian.py::test_messages_are_the_integers_of_the_formula",
    ),
    _plant(
        "successors that collude are not counted",
        _HANDED_ON,
        "                2 * corrupt,",
        "                corrupt,",
        "mechanisms/test_handed_on_gaussian.py::test_a_charge_is_that_of_the_theorem",
    ),
    _plant(
        "the noise of dropouts is counted",
        _HANDED_ON,
        "there = len(context.cohort) - self.max_dropped\n",
        "there = len(context.cohort)\n",
        "mechanisms/test_handed_on_gaussian.py::test_a_charge_is_that_of_the_theorem",
    ),
    _plant(
        "what two rounds of a client share is forgotten",
        _HANDED_ON,
        "(1.0 + power) / ((1.0 - KEPT**2) * (1.0 - power))",
        "1.0 / (1.0 - KEPT**2)",
        "mechanisms/test_handed_on_gaussian.py::test_no_pattern_of_participation_moves_more_than_is_charged",
    ),
    _plant(
        "the clip in place of twice the clip",
        "mechanisms/bases/modular_noise.py",
        "norm = padded_size(context.dim), 2.0 * self.bound(context)",
        "norm = padded_size(context.dim), self.bound(context)",
        "mechanisms/test_handed_on_gaussian.py::test_a_charge_is_that_of_the_theorem",
    ),
    _plant(
        "clients do not look at when they answered last",
        "rounds/client.py",
        "if linked and task.round - last[0] < needed:",
        "if False:",
        "flower/test_handed_on.py::test_a_client_refuses_a_round_that_comes_too_soon_in_one_block",
    ),
    _plant(
        "shares of clients that were silent are taken back",
        "rounds/server.py",
        "for other, client in pairs if other in self.in_last_sum)",
        "for other, client in pairs)",
        "mechanisms/test_handed_on_blocks.py::test_a_predecessor_that_was_silent_is_not_taken_back",
    ),
    _plant(
        "a claim for single messages",
        _HANDED_ON,
        "            Adversary.CLIENT: (1, ",
        '            Adversary.EAVESDROPPER: (0, ""),\n            Adversary.CLIENT: (1, ',
        "mechanisms/test_handed_on_gaussian.py::test_who_sees_messages_is_promised_nothing",
    ),
)

_DRAWN = "name = names[int(secret.uniform_below(len(names), 1)[0])]\n"
_BEGIN = "            page.begin(self._costs[name])\n"
_RUN = '            folder = run_config(config, "run", private)\n'
SWEEPS = (
    _plant(
        "a fixed number of runs",
        "lab/commands/sweep.py",
        "for _ in range(self._trials.draw(secret)):",
        "for _ in range(round(self._trials.mean)):",
        "lab/commands/test_sweep.py::test_the_winner_is_exported_alone_and_says_the_same_for_any_number_of_runs",
    ),
    _plant(
        "the page tells the number of runs",
        "lab/commands/sweep.py",
        '{"settings": name, monitor: score}, self._page, begun)',
        '{"settings": name, monitor: score}, f"{self._page}{len(made)} runs", begun)',
        "lab/commands/test_sweep.py::test_the_winner_is_exported_alone_and_says_the_same_for_any_number_of_runs",
    ),
    _plant(
        "the winner's settings tell which run it was",
        "lab/commands/sweep.py",
        '{"settings": name, monitor: score}',
        '{"settings": name, monitor: score, "run": folder.name}',
        "lab/commands/test_sweep.py::test_the_winner_is_exported_alone_and_says_the_same_for_any_number_of_runs",
    ),
    _plant(
        "the time of the winner's files tells how long the runs took",
        "lab/commands/sweep.py",
        "        os.utime(path, (begun, begun))",
        "        pass",
        "lab/commands/test_sweep.py::test_the_time_of_the_winner_tells_nothing_of_the_number_of_runs",
    ),
    _plant(
        "the winner comes out as soon as it is known",
        "lab/commands/sweep.py",
        "    time.sleep(left)",
        "",
        "lab/commands/test_sweep.py::test_the_time_of_the_winner_tells_nothing_of_the_number_of_runs",
    ),
    Plant(
        "the candidate is drawn once, for all runs",
        "lab/commands/sweep.py",
        (
            ("Stream(os.urandom(32))\n", f"Stream(os.urandom(32))\n        {_DRAWN}"),
            (f"            {_DRAWN}            config", "            config"),
        ),
        "lab/commands/test_sweep.py::test_every_run_draws_a_candidate_of_its_own",
    ),
    _plant(
        "a score of clients' data may choose the winner",
        "lab/commands/sweep.py",
        'if not monitor.startswith("val"):',
        "if False:",
        "lab/commands/test_sweep.py::test_what_nothing_is_known_of_is_refused_before_anything_is_trained",
    ),
    _plant(
        "an early stop by the losses of clients' training",
        "training/metrics.py",
        "if monitor in forks(name) and monitor not in self._elsewhere:",
        "if False:",
        "training/test_client_metrics.py::test_who_watches_what_stays_with_the_clients_is_named",
    ),
    _plant(
        "a run that fails is not paid for",
        "lab/commands/sweep.py",
        _BEGIN + _RUN,
        _RUN + _BEGIN,
        "lab/commands/test_sweep.py::test_a_run_that_fails_publishes_nothing_and_is_paid_for",
    ),
    _plant(
        "the ledger is reset between runs",
        "lab/commands/sweep.py",
        "        self.costs.append(cost)\n        self._charges.append(cost.most_charges)",
        "        self.costs, self._charges = [cost], [cost.most_charges]",
        "lab/commands/test_sweep.py::test_all_points_of_a_grid_cost_everybody_all",
    ),
    _plant(
        "a score that is no number may win",
        "lab/commands/sweep.py",
        "worst if math.isnan(last[monitor]) else last[monitor]",
        "last[monitor]",
        "lab/commands/test_sweep.py::test_a_score_that_is_no_number_never_wins",
    ),
    _plant(
        "the cheapest candidate counts in place of the worst",
        "lab/commands/experiment.py",
        "worst = tuple(max(loss",
        "worst = tuple(min(loss",
        "lab/commands/test_sweep.py::test_the_winner_is_as_costly_as_the_worst_candidate",
    ),
    _plant(
        "what is cut off of the number of runs is not in delta",
        "lab/selection.py",
        "trials.mean * slack.distance + trials.beyond",
        "trials.mean * slack.distance",
        "lab/test_selection.py::test_what_is_cut_off_is_distance",
    ),
    _plant(
        "the divergence of the second order is left out",
        "lab/selection.py",
        "((1.0 - 1.0 / c) * value - math.log(self.gamma) / c)",
        "(-math.log(self.gamma) / c)",
        "lab/test_selection.py::test_the_vectors",
    ),
    _plant(
        "eta = 0 with the gamma of eta = 1",
        "lab/selection.py",
        "return cls(eta, math.exp(log_gamma)).mean - mean",
        "return cls(1.0, math.exp(log_gamma)).mean - mean",
        "lab/test_selection.py::test_gammas_of_eta_0",
    ),
    _plant(
        "the largest order's own term is forgotten",
        "lab/selection.py",
        "several = math.log(trials.mean)",
        "several = 0.0",
        "lab/test_selection.py::test_the_vectors",
    ),
)

CLAIMS = (
    _plant(
        "the last sample of a batch that is shorter than expected is not clipped",
        "dpsgd/opacus.py",
        "factors = torch.where(finite, factors, 0.0) / self.grid",
        "factors = torch.where(finite, factors, 0.0) / self.grid\n"
        "        if len(factors) < self.expected_batch_size:\n"
        "            factors[-1] = 1.0 / self.grid",
        "callbacks/test_dpsgd_draws.py::test_every_sample_is_clipped_in_batches_of_all_sizes",
    ),
    Plant(
        "clients keep what a round left that was given up",
        "training/simulation.py",
        (
            ("        self.worker.states.count(engine.in_last_sum)\n", ""),
            ("        self.worker.states.count(())  # of a round that was given up\n", ""),
        ),
        "algorithms/test_algorithms.py::test_clients_keep_nothing_of_a_round_that_was_given_up",
    ),
    _plant(
        "a round that is repeated goes on in its middle",
        "training/resume.py",
        "    epochs, batches = loops",
        "    return\n    epochs, batches = loops",
        "callbacks/test_federated_resume.py::test_callbacks_are_told_of_the_start_of_a_round_that_is_repeated",
    ),
    _plant(
        "the profile's slope with eta in place of 1 + eta",
        "lab/selection.py",
        "return own + (1.0 + eta) * least(",
        "return own + eta * least(",
        "lab/test_selection_profiles.py::test_the_vectors",
    ),
    _plant(
        "gamma and 1 - gamma exchanged in the profile",
        "lab/selection.py",
        "(1.0 - gamma) * at(e) <= gamma * math.expm1(e)",
        "gamma * at(e) <= (1.0 - gamma) * math.expm1(e)",
        "lab/test_selection_profiles.py::test_the_vectors",
    ),
    _plant(
        "the mean number of runs is forgotten in the profile's delta",
        "lab/selection.py",
        "least(lambda e: trials.mean * at(e) <= delta)",
        "least(lambda e: at(e) <= delta)",
        "lab/test_selection_profiles.py::test_the_vectors",
    ),
    _plant(
        "the best candidate's profile in place of the worst",
        "lab/selection.py",
        "return lambda epsilon: max(min(",
        "return lambda epsilon: min(min(",
        "lab/test_selection_profiles.py::test_the_worst_candidate_counts",
    ),
    _plant(
        "a slack in log-ratio leaves the profile as it is",
        "lab/selection.py",
        "profile(epsilon - 2.0 * log_ratio)",
        "profile(epsilon)",
        "lab/test_selection_profiles.py::test_the_slack_of_a_run_is_paid",
    ),
    _plant(
        "participations are composed one by one",
        "mechanisms/handed_on_gaussian.py",
        "self.note, self.count * count)",
        "self.note) if count == 1 else replace(self, rho=count * self.rho)",
        "mechanisms/test_handed_on_gaussian.py::test_charges_are_not_added_one_by_one",
    ),
    _plant(
        "two parts of one stream add their rhos",
        "mechanisms/handed_on_gaussian.py",
        "if (self.limit, self.separation) == (other.limit, other.separation):",
        "if False:",
        "mechanisms/test_handed_on_gaussian.py::test_charges_are_not_added_one_by_one",
    ),
    _plant(
        "kinds of rounds of one stream are charged as if independent",
        "privacy/accounting.py",
        "kind in self.losses) > 1\n",
        "kind in self.losses) > 99\n",
        "mechanisms/test_handed_on_gaussian.py::test_kinds_of_rounds_of_one_stream_cost_the_limit_each",
    ),
    _plant(
        "what the ends of a stream spare is counted twice",
        "mechanisms/handed_on_gaussian.py",
        "ends = 2.0 * power",
        "ends = 4.0 * power",
        "mechanisms/test_handed_on_gaussian.py::test_no_pattern_of_participation_moves_more_than_is_charged",
    ),
    _plant(
        "an allocated update moves by one clip in place of two",
        "privacy/losses/allocation.py",
        "m, rounds = 0.5 / self.noise_multiplier",
        "m, rounds = 0.25 / self.noise_multiplier",
        "privacy/test_allocation.py::test_the_vectors",
    ),
    _plant(
        "an allocated update is compared with none",
        "privacy/losses/allocation.py",
        "ends = np.exp(m * edges - 0.5 * m * m) - factor * np.exp(-m * edges - 0.5 * m * m)",
        "ends = np.exp(m * edges - 0.5 * m * m) - factor",
        "privacy/test_allocation.py::test_two_rounds_are_the_integral_of_the_pair_from_above",
    ),
    _plant(
        "a block of T rounds is summed over T - 1",
        "privacy/losses/allocation.py",
        "fft.rfft(law) ** rounds",
        "fft.rfft(law) ** (rounds - 1)",
        "privacy/test_allocation.py::test_it_is_above_what_is_simulated",
    ),
    _plant(
        "chords between epsilons are drawn below the curve",
        "privacy/losses/allocation.py",
        "np.append(near * np.arange(_NODES) / _NODES,",
        "np.append(near * np.arange(1, _NODES + 1) / _NODES,",
        "privacy/test_allocation.py::test_the_curve_is_above_its_nodes_and_never_above_a_known_round",
    ),
    _plant(
        "a norm is clipped to twice the norm",
        "dpsgd/opacus.py",
        "factors = (self.max_grad_norm *",
        "factors = (2.0 * self.max_grad_norm *",
        "callbacks/test_dpsgd_draws.py::test_every_sample_is_clipped_in_batches_of_all_sizes",
    ),
    _plant(
        "the norm of the last layer alone is clipped",
        "dpsgd/opacus.py",
        "norms = squares.sum(0).sqrt()",
        "norms = squares[-1].sqrt()",
        "callbacks/test_dpsgd.py::test_the_first_step_is_clipping_averaging_and_noise",
    ),
    _plant(
        "half of DP-SGD's noise",
        "dpsgd/opacus.py",
        "noise = discrete_gaussian(STEPS_PER_SIGMA, p.numel(), words)",
        "noise = discrete_gaussian(0.5 * STEPS_PER_SIGMA, p.numel(), words)",
        "callbacks/test_dpsgd.py::test_noise_has_the_stated_std",
    ),
    _plant(
        "a sample that is not finite is let through",
        "dpsgd/opacus.py",
        "g = torch.where(finite.reshape(-1, *[1] * (g.dim() - 1)), g, 0.0)",
        "g = torch.nan_to_num(g) * 1e6",
        "callbacks/test_dpsgd.py::test_the_first_step_is_clipping_averaging_and_noise",
    ),
    _plant(
        "only removed samples are accounted for",
        "dpsgd/opacus.py",
        "for removal in (True, False))",
        "for removal in (False,))",
        "dpsgd/test_opacus.py::test_agrees_with_dp_accounting",
    ),
    _plant(
        "a step in which nobody was drawn costs nothing",
        "dpsgd/opacus.py",
        "        self.accountant.step(noise_multiplier",
        "        if step % 2:\n            return step\n        self.accountant.step(noise_multiplier",
        "dpsgd/test_accounts.py::test_a_step_is_paid_for_by_its_client_and_has_the_next_number",
    ),
    _plant(
        "the budget of steps is one too large",
        "dpsgd/opacus.py",
        "self.steps + steps <= self.step_limit",
        "self.steps + steps <= self.step_limit + 1",
        "dpsgd/test_opacus.py::test_an_account_pays_within_its_limit",
    ),
    _plant(
        "samples are taken twice as often as is paid for",
        "dpsgd/poisson.py",
        ".words(len(held)) < self.thresholds[client]",
        ".words(len(held)) < 2 * self.thresholds[client]",
        "dpsgd/test_poisson.py::test_poisson_sampling_takes_each_sample_with_its_probability",
    ),
    _plant(
        "rounds of a killed process are not paid for",
        "dpsgd/accounts.py",
        "lost[client] * self._batches.steps[client]",
        "0 * lost[client]",
        "dpsgd/test_accounts.py::test_lost_rounds_are_paid_for_once",
    ),
    _plant(
        "steps draw from a key that everybody knows",
        "callbacks/dpsgd.py",
        'self._key("draws", self._present, 0 if account is None else account.steps)',
        "bytes(32)",
        "callbacks/test_dpsgd_draws.py::test_no_draw_of_any_hook_follows_from_seeds_or_recurs",
    ),
    _plant(
        "half of the field of shares is never drawn",
        "secagg/shamir.py",
        'int.from_bytes(entropy(SHARE_BYTES), "big") >> 1) < PRIME',
        'int.from_bytes(entropy(SHARE_BYTES), "big") >> 2) < PRIME',
        "secagg/test_shamir.py::test_shares_are_uniform_field_elements",
    ),
    _plant(
        "a secret that fails its test is returned",
        "secagg/shamir.py",
        "if is_right(secret := element_bytes(value)):",
        "if is_right(secret := element_bytes(value)) or True:",
        "secagg/test_shamir.py::test_nothing_is_returned_where_too_many_are_wrong_or_the_commitment_is",
    ),
    _plant(
        "one holder more computes its shares freely",
        "secagg/graph.py",
        "return rank < threshold - 1",
        "return rank < threshold",
        "secagg/test_graph.py::test_an_owner_has_threshold_less_one_free_holders",
    ),
    _plant(
        "survivors in two parts count as one",
        "secagg/graph.py",
        "for a, b in zip(places, following, strict=True)) < 2",
        "for a, b in zip(places, following, strict=True)) < 3",
        "secagg/test_graph.py::test_connectedness_of_every_subset",
    ),
    _plant(
        "colluders may hold as many shares as open a secret",
        "secagg/graph.py",
        "return -math.inf if corrupt < threshold else 0.0",
        "return -math.inf if corrupt <= threshold else 0.0",
        "secagg/test_graph.py::test_complete_graph_is_certain",
    ),
    _plant(
        "masks modulo m are biased",
        "secagg/layout.py",
        "largest, modulus = 2**bits // self.modulus * self.modulus - 1,",
        "largest, modulus = 2**bits - 1,",
        "secagg/test_layout.py::test_rejection_has_no_modulo_bias",
    ),
    _plant(
        "a client sends without its own mask",
        "secagg/client.py",
        "            layout.add_mask(masked, self_mask_key(self._context, self.client, self._seed))\n",
        "",
        "secagg/test_simulation.py::test_masked_and_accounted_agree_to_the_bit",
    ),
    _plant(
        "a client answers a stage twice",
        "secagg/client.py",
        "        if self._next != name:\n",
        "        if False:\n",
        "secagg/test_malicious_server.py::test_15_asking_twice_for_the_other_share",
    ),
    _plant(
        "clients with a key in common are accepted",
        "secagg/client.py",
        "                if key in seen:\n",
        "                if False:\n",
        "secagg/test_malicious_server.py::test_4_same_key_for_two_clients",
    ),
    _plant(
        "a client's own key may be another one",
        "secagg/client.py",
        "if keys[self.client] != self._keys:",
        "if False:",
        "secagg/test_malicious_server.py::test_3_own_key_changed",
    ),
    _plant(
        "signatures of the roster are not verified",
        "secagg/client.py",
        "            wire.verify("
        "self._directory.get(client), own.signature, statement, Stage.SHARE, client)\n",
        "            pass\n",
        "secagg/test_malicious_server.py::test_1_substituted_key",
    ),
    _plant(
        "too few clients are enough",
        "secagg/client.py",
        "        if len(clients) < fewest:\n",
        "        if False:\n",
        "secagg/test_malicious_server.py::test_5_roster_below_the_threshold",
    ),
    _plant(
        "releases go on after their budget",
        "training/release.py",
        "if limits is not None and bool((engine.ledger.charges >= limits).any()):",
        "if False:",
        "training/test_released_evaluation.py::test_no_more_is_released_than_was_counted",
    ),
    _plant(
        "releases are keyed from the plan's seed",
        "training/release.py",
        "        if federation.seed is not None:\n",
        "        if True:\n",
        "lab/commands/test_audit_fresh.py::test_every_fit_draws_afresh_and_every_kind_is_seen",
    ),
    _plant(
        "a client's measurement draws as all others' do",
        "training/client_evaluation.py",
        "self._seed_of(round, client)",
        "self._seed_of(round, 0)",
        "training/test_measured_alone.py::test_each_client_draws_by_a_seed_of_its_own",
    ),
    _plant(
        "a large epsilon rounds to certainty",
        "functional/direction_choice.py",
        "rest = self.num_top * ((1 << WORD_BITS) - self.threshold)",
        "rest = self.num_top * int(2.0**WORD_BITS * (1.0 - self.top_probability))",
        "mechanisms/test_priv_unit.py::test_a_large_epsilon_is_finite_and_that_of_the_integers",
    ),
    _plant(
        "an update of a client that was given up is in the mean",
        "rounds/server.py",
        "        self._open_plan()\n        self._aborted = reason",
        '        self._open_plan()\n        self._aborted = ""',
        "algorithms/test_algorithms.py::test_clients_keep_nothing_of_a_round_that_was_given_up",
    ),
)
LAYERS = (
    _plant(
        "a stream's key ignores its purpose",
        "keys/randomness.py",
        "self._prefixes[purpose] = self._address + pack_fields(purpose)",
        "self._prefixes[purpose] = self._address",
        "keys/test_randomness.py::test_every_address_field_changes_the_stream",
    ),
    _plant(
        "streams of a repeated round are the first attempt's",
        "keys/randomness.py",
        "pack_fields(_PROTOCOL, self.federation, round, attempt)",
        "pack_fields(_PROTOCOL, self.federation, round)",
        "keys/test_randomness.py::test_every_address_field_changes_the_stream",
    ),
    _plant(
        "a larger group's key follows from what everybody knows",
        "keys/randomness.py",
        "group_key([hkdf_expand(self._seeds[member], info) for member",
        "group_key([hkdf_expand(self._public, info) for member",
        "keys/test_party_keys.py::test_a_group_of_three_forms_the_key_of_one_process",
    ),
    _plant(
        "a client whose folder is set back draws the same coins",
        "keys/party_keys.py",
        "private_key(secrets.seed + entropy(32), federation)",
        "private_key(secrets.seed + bytes(32), federation)",
        "keys/test_party_keys.py::test_coins_of_a_client_s_own_are_never_drawn_twice",
    ),
    _plant(
        "a signed key counts in every federation",
        "keys/party_keys.py",
        'return pack_fields("fedq client key", federation, public_key)',
        'return pack_fields("fedq client key", public_key)',
        "keys/test_party_keys.py::test_a_signed_key",
    ),
    _plant(
        "the roster's hash leaves out who has which key",
        "keys/randomness.py",
        "digest.update(pack_fields(client, key))",
        "digest.update(pack_fields(key))",
        "keys/test_party_keys.py::test_a_rosters_hash_says_who_has_which_key",
    ),
    _plant(
        "a symbol that does not fit is cut off",
        "wire/coding.py",
        "if values.size and not (low <= values.min() and values.max() < high):",
        "if False:",
        "wire/test_coding.py::test_a_symbol_that_does_not_fit_is_refused",
    ),
    _plant(
        "negative symbols come back positive",
        "wire/coding.py",
        "full[:, : 64 - width] = bits[:, :1]",
        "full[:, : 64 - width] = 0",
        "wire/test_coding.py::test_round_trip",
    ),
    _plant(
        "bytes behind a message are ignored",
        "wire/coding.py",
        "if len(stream) != (count * width + 7) // 8:",
        "if len(stream) < (count * width + 7) // 8:",
        "wire/test_any_bytes.py::test_what_is_too_long_for_its_symbols_is_not_read",
    ),
    _plant(
        "a client answers one attempt twice",
        "rounds/client.py",
        "if (round, attempt) <= self._last:",
        "if (round, attempt) < self._last:",
        "rounds/test_halves.py::test_a_stream_carries_one_payload",
    ),
    _plant(
        "a stream is used before the disk knows",
        "rounds/client.py",
        "            self._journal.append(round, attempt, mechanism, None, dim, terms)\n        self._used",
        "            pass\n        self._used",
        "rounds/test_halves.py::test_a_stream_carries_one_payload",
    ),
    _plant(
        "an answer's tag is not verified",
        "rounds/messages.py",
        "if not hmac.compare_digest(_tag(message[:-_TAG_BYTES], client, rand), message[-_TAG_BYTES:]):",
        "if False:",
        "rounds/test_halves.py::test_messages_that_are_refused_change_nothing",
    ),
    _plant(
        "one dropout more than the claims allow for",
        "rounds/running_sum.py",
        "silent > tolerated:",
        "silent > tolerated + 1:",
        "mechanisms/test_handed_on_blocks.py::test_masks_and_dropouts_leave_the_weights_of_the_plain_sum",
    ),
    _plant(
        "a client is charged for one stream and uses it twice",
        "privacy/ledger.py",
        "(last[:, 0] == round) & (last[:, 1] >= attempt)",
        "(last[:, 0] == round) & (last[:, 1] > attempt)",
        "privacy/test_ledger.py::test_a_stream_is_paid_for_once_and_in_order",
    ),
    _plant(
        "limits by client are not looked at",
        "privacy/ledger.py",
        "        self._check_limits(rows, round)\n        if self.journal",
        "        if self.journal",
        "privacy/test_ledger.py::test_the_limit_counts_what_was_lost",
    ),
    _plant(
        "a damaged line of a journal counts",
        "privacy/journal.py",
        'raise ValueError("the checksum is wrong")',
        "pass",
        "privacy/test_damaged_journal.py::test_a_log_with_any_bit_flipped_is_refused",
    ),
    _plant(
        "masks that were only counted pass as run",
        "secagg/terms.py",
        'ran=self.run == "masked",',
        "ran=True,",
        "training/test_figures.py::test_what_masks_would_give_is_no_epsilon_of_a_run_without",
    ),
    _plant(
        "rotated coins count the victim's own as cover",
        "mechanisms/rotated_coins.py",
        "others = max(len(context.cohort) - 1 - self.max_dropped - known, 0)",
        "others = max(len(context.cohort) - self.max_dropped - known, 0)",
        "mechanisms/test_rotated_coins.py::test_epsilon_of_a_run_as_in_the_specification",
    ),
    _plant(
        "keys of peers are relayed unsigned",
        "flower/client.py",
        'verify_key(directory, peer, federation, key, signed.get(peer, b""))',
        "pass",
        "flower/test_active.py::test_a_partner_s_key_that_the_server_has_exchanged_is_refused",
    ),
    _plant(
        "signatures of registered clients are not verified",
        "flower/roster.py",
        "verify_key(self.directory, client, self._secrets.federation, key, signature)",
        "pass",
        "flower/test_active.py::test_a_client_whose_key_its_identity_has_not_signed_is_turned_away",
    ),
    _plant(
        "a client holds others' keys",
        "keys/party_keys.py",
        "self._check_own(client)\n        return self._own",
        "return self._own",
        "keys/test_party_keys.py::test_a_party_holds_nobody_else_s_keys",
    ),
)
