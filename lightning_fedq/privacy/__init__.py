"""Privacy accounting: what was protected, from whom, at which price: report, target, ledger."""
